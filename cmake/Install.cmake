# `cmake --install`, and what `find_package(latent_moe)` finds afterwards.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/latent_moe)

set(installed latent_moe)
if(TARGET latent_moe_mpi_shared)
    list(APPEND installed latent_moe_mpi_shared)
endif()
install(TARGETS ${installed} EXPORT latent_moe_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/latent_moe ${CMAKE_CURRENT_BINARY_DIR}/include/latent_moe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT latent_moe_targets NAMESPACE latent_moe:: DESTINATION ${package_dir})
if(TARGET latent-moe)
    install(TARGETS latent-moe RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(cmake/latent_moe-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/latent_moe-config.cmake
    INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/latent_moe-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/latent_moe-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/latent_moe-config-version.cmake
    DESTINATION ${package_dir})
