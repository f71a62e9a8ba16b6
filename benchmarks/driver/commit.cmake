# Writes HEADER with the commit of SOURCE_DIR, which results are stored with.

execute_process(
  COMMAND git -C ${SOURCE_DIR} describe --always --dirty
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit "unknown")
endif()
set(text "// What this build was made from.\ninline constexpr char kCommit[] = \"${commit}\";\n")
set(old "")
if(EXISTS ${HEADER})
  file(READ ${HEADER} old)
endif()
if(NOT text STREQUAL old)
  file(WRITE ${HEADER} "${text}")
endif()
