# OCTOPAGE_CUDA -> OCTOPAGE_HAS_CUDA. This version has no CUDA backend: AUTO builds without, ON is
# an error rather than a build that silently lacks what was asked for.
if(NOT OCTOPAGE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "OCTOPAGE_CUDA: must be AUTO, ON or OFF, is '${OCTOPAGE_CUDA}'")
endif()
if(OCTOPAGE_CUDA STREQUAL "ON")
  message(FATAL_ERROR "OCTOPAGE_CUDA=ON: octopage ${octopage_version} has no CUDA backend yet; use AUTO or OFF")
endif()
set(OCTOPAGE_HAS_CUDA OFF)
