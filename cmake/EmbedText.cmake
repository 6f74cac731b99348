# cmake -DDIRECTORY=... -DOUTPUT=... -P EmbedText.cmake: writes a C++ file that holds page.html, page.css and
# page.js of a directory as string constants.
set(text "// Written by cmake/EmbedText.cmake.\n\n#include \"tools/octopage/inspect_page.hpp\"\n\nnamespace octopage::cli {\n")
foreach(input html css js)
  file(READ ${DIRECTORY}/page.${input} content)
  string(TOUPPER ${input} name)
  string(APPEND text "\nconst std::string_view kPage${name} = R\"octopage(${content})octopage\";\n")
endforeach()
string(APPEND text "\n}  // namespace octopage::cli\n")
file(WRITE ${OUTPUT} "${text}")
