# latent_moe_test(NAME io_tests SOURCES a_test.cpp … LIBRARIES …): one GoogleTest program, its cases known to CTest.
find_package(GTest REQUIRED)
include(GoogleTest)

function(latent_moe_test)
    cmake_parse_arguments(TEST "" "NAME;TIMEOUT" "SOURCES;LIBRARIES;LABELS" ${ARGN})
    if(NOT TEST_TIMEOUT)
        set(TEST_TIMEOUT 300)
    endif()
    if(NOT TEST_LABELS)
        set(TEST_LABELS short)
    endif()
    add_executable(${TEST_NAME} ${TEST_SOURCES})
    target_include_directories(${TEST_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${TEST_NAME} PRIVATE ${TEST_LIBRARIES} latent_moe_options GTest::gtest_main GTest::gtest)
    gtest_discover_tests(${TEST_NAME} TEST_PREFIX "${TEST_NAME}." DISCOVERY_TIMEOUT 60
        PROPERTIES TIMEOUT ${TEST_TIMEOUT} LABELS ${TEST_LABELS}
        ENVIRONMENT "TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp halt_on_error=1")
endfunction()
