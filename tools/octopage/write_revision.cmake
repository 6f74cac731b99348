# Writes OUT with the revision of the tree SOURCE, only where it changed: run before every build.
set(revision unknown)
execute_process(COMMAND git rev-parse HEAD WORKING_DIRECTORY ${SOURCE}
  OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(NOT failed AND EXISTS ${SOURCE}/.git)
  set(revision ${head})
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define OCTOPAGE_REVISION \"${revision}\"\n")
