# Kernels for AMD GPUs: finds a clang that makes them, and hip_objects(…), since CMake's own HIP language wants a whole ROCm.
#
# Two ways to have it: ROCm (in /opt/rocm or ROCM_PATH), whose clang knows where its device libraries are; or Debian's clang-19 with
# rocm-device-libs and libamdhip64-dev, where the libraries must be shown to it, gfx942's among them under its older name.
set(rocm $ENV{ROCM_PATH})
if(NOT rocm)
    set(rocm /opt/rocm)
endif()
find_program(LATENT_MOE_HIP_COMPILER NAMES amdclang++ clang++-19 HINTS ${rocm}/bin ${rocm}/llvm/bin)
find_path(LATENT_MOE_HIP_INCLUDE hip/hip_runtime.h HINTS ${rocm}/include)
if(NOT LATENT_MOE_HIP_COMPILER OR NOT LATENT_MOE_HIP_INCLUDE)
    message(FATAL_ERROR "LATENT_MOE_GPU is hip, but clang++ or hip/hip_runtime.h was not found: expected ROCm in ${rocm}, or the "
        "packages clang-19, clang-tools-19, lld-19, rocm-device-libs and libamdhip64-dev")
endif()
set(LATENT_MOE_HIP_FLAGS -x hip -std=c++20 -O3 -fPIC -fvisibility=hidden -mcode-object-version=5
    # Every product and sum is rounded by itself, as on the host, except where the source says fma.
    -ffp-contract=off -DLATENT_MOE_HIP -Wall -Wextra -Wno-unused-command-line-argument
    -Wno-pass-failed -Wno-missing-field-initializers -Wno-missing-designated-field-initializers)
if(LATENT_MOE_WARNINGS_AS_ERRORS)
    list(APPEND LATENT_MOE_HIP_FLAGS -Werror)
endif()
if(NOT LATENT_MOE_HIP_INCLUDE STREQUAL "/usr/include")
    list(APPEND LATENT_MOE_HIP_FLAGS -isystem ${LATENT_MOE_HIP_INCLUDE})
endif()
if(LATENT_MOE_HIP_COMPILER MATCHES "clang\\+\\+-19$")
    set(device_libraries ${CMAKE_BINARY_DIR}/amdgcn)
    file(GLOB bitcode /usr/lib/*/amdgcn/bitcode/*.bc)
    if(NOT bitcode)
        message(FATAL_ERROR "LATENT_MOE_GPU is hip, but there are no device libraries: expected the package rocm-device-libs")
    endif()
    file(MAKE_DIRECTORY ${device_libraries})
    foreach(file ${bitcode})
        get_filename_component(name ${file} NAME)
        file(CREATE_LINK ${file} ${device_libraries}/${name} SYMBOLIC)
    endforeach()
    if(NOT EXISTS ${device_libraries}/oclc_isa_version_942.bc)
        file(CREATE_LINK ${device_libraries}/oclc_isa_version_940.bc ${device_libraries}/oclc_isa_version_942.bc SYMBOLIC)
    endif()
    list(APPEND LATENT_MOE_HIP_FLAGS --rocm-path=/usr --rocm-device-lib-path=${device_libraries})
endif()

if(NOT LATENT_MOE_HIP_ARCHITECTURES)
    set(LATENT_MOE_HIP_ARCHITECTURES gfx942 gfx90a)
    file(WRITE ${CMAKE_BINARY_DIR}/empty.hip "")
    execute_process(COMMAND ${LATENT_MOE_HIP_COMPILER} -x hip --offload-arch=gfx950 -nogpulib -nogpuinc --cuda-device-only -c
        ${CMAKE_BINARY_DIR}/empty.hip -o ${CMAKE_BINARY_DIR}/empty.o RESULT_VARIABLE unknown OUTPUT_QUIET ERROR_QUIET)
    if(unknown EQUAL 0)
        list(APPEND LATENT_MOE_HIP_ARCHITECTURES gfx950)
    else()
        message(STATUS "${LATENT_MOE_HIP_COMPILER} does not know gfx950: no code for it")
    endif()
endif()

# hip_objects(VARIABLE source.cu …): one host object a source, with code for every architecture in it.
function(hip_objects variable)
    set(objects)
    foreach(source ${ARGN})
        set(object ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
        get_filename_component(folder ${object} DIRECTORY)
        file(MAKE_DIRECTORY ${folder})
        add_custom_command(OUTPUT ${object}
            COMMAND ${LATENT_MOE_HIP_COMPILER} ${LATENT_MOE_HIP_FLAGS}
                "$<$<BOOL:${LATENT_MOE_HIP_ARCHITECTURES}>:--offload-arch=$<JOIN:${LATENT_MOE_HIP_ARCHITECTURES},;--offload-arch=>>"
                -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
                -MD -MF ${object}.d -MT ${object} -c ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${object}
            DEPENDS ${source} DEPFILE ${object}.d COMMAND_EXPAND_LISTS VERBATIM
            COMMENT "HIP ${source}")
        list(APPEND objects ${object})
    endforeach()
    set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
    set(${variable} ${objects} PARENT_SCOPE)
endfunction()
