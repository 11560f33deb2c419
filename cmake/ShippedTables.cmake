# Writes the files of tables/ into a source file, so that the library carries them.
file(GLOB table_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tables/*.json)
set(shipped_entries "")
foreach(table_file ${table_files})
    file(READ ${table_file} table_text)
    get_filename_component(table_name ${table_file} NAME)
    string(APPEND shipped_entries "    {\"${table_name}\", R\"table(${table_text})table\"},\n")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table_file})
endforeach()
set(shipped_tables_source ${CMAKE_CURRENT_BINARY_DIR}/shipped_tables.cpp)
file(CONFIGURE OUTPUT ${shipped_tables_source} @ONLY CONTENT [[
// Generated from the files of tables/.
#include "context/shipped_tables.h"

namespace latent_moe {

const std::vector<ShippedTable>& shipped_tables() {
    static const std::vector<ShippedTable> tables = {
@shipped_entries@    };
    return tables;
}

}  // namespace latent_moe
]])
