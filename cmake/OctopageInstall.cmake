# Install rules, the CMake package and the pkg-config file. A subproject installs nothing of its own
# accord unless it asks for it.
option(OCTOPAGE_INSTALL "Install octopage" ${PROJECT_IS_TOP_LEVEL})
if(NOT OCTOPAGE_INSTALL)
  return()
endif()

include(CMakePackageConfigHelpers)
set(octopage_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/octopage)

install(TARGETS octopage EXPORT octopage-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/octopage DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT octopage-targets NAMESPACE octopage:: DESTINATION ${octopage_package_dir})

get_target_property(octopage_library_type octopage TYPE)
set(octopage_is_static OFF)
if(octopage_library_type STREQUAL "STATIC_LIBRARY")
  set(octopage_is_static ON)
endif()
configure_package_config_file(cmake/octopage-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/octopage-config.cmake
  INSTALL_DESTINATION ${octopage_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/octopage-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/octopage-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/octopage-config-version.cmake
  DESTINATION ${octopage_package_dir})

# A static library passes on what it needs; a shared one carries it. Only one of the two is installed,
# so what a static one needs is no private matter: no caller has to know which it is.
set(octopage_pc_requires "")
set(octopage_pc_libs "")
if(octopage_is_static)
  set(octopage_pc_requires "tbb, libhwy, libhwy-contrib")
  set(octopage_pc_libs " -lstdc++ -lm -lpthread")
  if(OCTOPAGE_HAS_CUDA)
    string(APPEND octopage_pc_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
# The file says where it lies, so that an installed tree may be moved.
file(RELATIVE_PATH octopage_pc_up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/octopage.pc.in ${CMAKE_CURRENT_BINARY_DIR}/octopage.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/octopage.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
