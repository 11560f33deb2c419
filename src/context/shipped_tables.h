// The tables of `tables/`, as text: built in, so that they are where the library is.
#pragma once

#include <string>
#include <vector>

namespace latent_moe {

struct ShippedTable {
    std::string name;  ///< of the file
    std::string text;
};

const std::vector<ShippedTable>& shipped_tables();

}  // namespace latent_moe
