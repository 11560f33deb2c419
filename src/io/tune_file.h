// The file that `latent-moe tune` writes and a context reads: tables of measured times, a machine and shape each.
//
//     {"schema": "latent-moe/tune/1", "tables": [{"version": …, "device": …, "links": …, "tp": …, "hidden": …, "latent": …,
//      "norm": …, "dtype": …, "shared": …, "sequence_parallel": …, "batch_invariant": …, "float8_weights": …, "origin": …,
//      "points": [{"tokens": 1, "us": {"column_parallel": 17.2, "fused": 9.5}}, …]}]}
//
// Fields that it does not know it ignores, so that people and later versions can add some.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/tune_table.h"

namespace latent_moe::io {

/// Throws `Error(io)` that names `source` and the field for anything else. Touches no file.
std::vector<TuneTable> parse_tune_tables(std::string_view text, std::string_view source);
std::vector<TuneTable> read_tune_tables(const std::filesystem::path& path);

/// What `parse_tune_tables` reads back bit for bit.
std::string tune_text(const std::vector<TuneTable>& tables);
/// The file appears complete or not at all.
void write_tune_tables(const std::filesystem::path& path, const std::vector<TuneTable>& tables);

}  // namespace latent_moe::io
