# What every target of the project is compiled with: `target_link_libraries(… PRIVATE latent_moe_options)`.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
find_program(LATENT_MOE_CCACHE ccache)
if(LATENT_MOE_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${LATENT_MOE_CCACHE})
endif()

add_library(latent_moe_options INTERFACE)
# Warnings go to C++ alone: nvcc passes them to the host compiler for code that it generated itself.
target_compile_options(latent_moe_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wnon-virtual-dtor>
    # A designated initialiser that leaves the rest at its default is meant so.
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>
    $<$<COMPILE_LANGUAGE:CXX>:-fopenmp-simd>)
if(LATENT_MOE_WARNINGS_AS_ERRORS)
    target_compile_options(latent_moe_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(LATENT_MOE_SANITIZE STREQUAL "address")
    # Line numbers are enough of debug information, and optimising what the sanitizers add takes longer than it saves.
    set(sanitizers -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(LATENT_MOE_SANITIZE STREQUAL "thread")
    set(sanitizers -g1 -fsanitize=thread -fno-omit-frame-pointer)
elseif(LATENT_MOE_SANITIZE)
    message(FATAL_ERROR "LATENT_MOE_SANITIZE is '${LATENT_MOE_SANITIZE}', expected address, thread or nothing")
endif()
if(sanitizers)
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${sanitizers}>")
    add_link_options("$<$<LINK_LANGUAGE:CXX>:${sanitizers}>")
endif()
