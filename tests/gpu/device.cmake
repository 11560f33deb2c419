# A program for a machine with a GPU: what `bench` relies on of a device. Not run by CTest.
add_executable(device_check gpu/device_check.cpp)
target_link_libraries(device_check PRIVATE latent_moe_engine latent_moe_gpu latent_moe_options)
target_include_directories(device_check PRIVATE ${PROJECT_SOURCE_DIR}/src)
set_target_properties(device_check PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/gpu BUILD_RPATH "$ORIGIN/lib" BUILD_RPATH_USE_ORIGIN ON)

# Build check: all kernels compile for the generations before and after the one that is built here, to machine code but without
# optimisation. Never run. The fused tail has no body there: its main loop is sm_90a's (wgmma, the tensor copy engine).
file(GLOB kernel_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/gpu/kernels/*.cu)
foreach(source IN LISTS kernel_sources)
    get_filename_component(kernel ${source} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/portable/${kernel}.o)
    add_custom_command(OUTPUT ${object}
        COMMAND ${CMAKE_CUDA_COMPILER_LAUNCHER} ${CMAKE_CUDA_COMPILER} -std=c++20 --expt-relaxed-constexpr -Xcicc=-O0 -Xptxas=-O0
            -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_100,code=sm_100
            -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_BINARY_DIR}/include -c ${source} -o ${object}
        DEPENDS ${source} COMMENT "Compiling ${kernel}.cu for sm_80 and sm_100" VERBATIM)
    list(APPEND portable_objects ${object})
endforeach()
file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/portable)
add_custom_target(portable-kernels DEPENDS ${portable_objects})
add_test(NAME gpu.portable_kernels COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target portable-kernels)
set_tests_properties(gpu.portable_kernels PROPERTIES TIMEOUT 1800 LABELS long)
