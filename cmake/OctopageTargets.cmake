# How every target of octopage is compiled.

find_package(Threads REQUIRED)

# Only a top-level build chooses a default build type or reuses earlier compilations.
if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  find_program(OCTOPAGE_CCACHE ccache)
  if(OCTOPAGE_CCACHE)
    foreach(lang C CXX CUDA)
      if(NOT CMAKE_${lang}_COMPILER_LAUNCHER)
        set(CMAKE_${lang}_COMPILER_LAUNCHER ${OCTOPAGE_CCACHE})
      endif()
    endforeach()
  endif()
endif()

# octopage_finds_bundle(<target> <folder>): the installed target looks for shared libraries there. As an
# RPATH, which holds for what those libraries need in turn.
function(octopage_finds_bundle target folder)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${folder}")
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
endfunction()

# octopage_defaults(<target>): language level, visibility, warnings.
function(octopage_defaults target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    C_STANDARD 11
    CXX_VISIBILITY_PRESET hidden
    C_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  if(PROJECT_IS_TOP_LEVEL)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow -Wpointer-arith>
      $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
      $<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<BOOL:${OCTOPAGE_WERROR}>>:-Werror>)
  endif()
endfunction()
