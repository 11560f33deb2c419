# cmake -DSOURCE=src -DTO=folder -DMUTANT=name|none -P mutate.cmake: copies the protocol's headers to TO/gpu, with one fault of
# mutants.cmake, and with windows as small as the models are.
set(changed no)
file(REMOVE_RECURSE ${TO}/gpu)
file(COPY ${SOURCE}/gpu/primitives ${SOURCE}/gpu/kernels DESTINATION ${TO}/gpu FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh")

function(replace file from to)
    file(READ ${TO}/gpu/${file} text)
    string(FIND "${text}" "${from}" at)
    if(at EQUAL -1)
        message(FATAL_ERROR "${MUTANT}: src/gpu/${file} does not contain '${from}'")
    endif()
    string(REPLACE "${from}" "${to}" text "${text}")
    file(WRITE ${TO}/gpu/${file} "${text}")
endfunction()

replace(primitives/window.h "max_ranks = 16;" "max_ranks = 4;")
replace(primitives/window.h "max_grid = 256;" "max_grid = 4;")

macro(mutant name file from to)
    if(MUTANT STREQUAL "${name}")
        replace(${file} "${from}" "${to}")
        set(changed yes)
    endif()
endmacro()
include(${CMAKE_CURRENT_LIST_DIR}/mutants.cmake)
if(NOT changed AND NOT MUTANT STREQUAL "none")
    message(FATAL_ERROR "no mutant is called '${MUTANT}'")
endif()
