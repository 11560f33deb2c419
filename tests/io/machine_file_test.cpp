// Constants of a machine as a file: what is written is read back, and what is broken is refused by name.
#include "io/machine_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "gpu/known_devices.h"
#include "io/files.h"
#include "latent_moe/status.h"

namespace latent_moe::io {
namespace {

TEST(MachineFile, ReadsBackWhatItWroteBitForBit) {
    for (MachineKind kind : gpu::known_devices()) {
        kind.machine.hop_us = 1.0 / 3;
        kind.unmeasured = {"hop_us", "wire_bytes_per_us"};
        kind.one_stage_bytes = MachineKind{}.one_stage_bytes, kind.not_captured_reason.clear();  // not in a file
        EXPECT_EQ(parse_machine(machine_text(kind), "m.json"), kind);
    }
    const TemporaryFolder folder;
    std::ofstream(folder / "m.json") << machine_text(gpu::known_devices().front());
    EXPECT_EQ(read_machine(folder / "m.json"), gpu::known_devices().front());
}

TEST(MachineFile, IgnoresFieldsOfLaterVersions) {
    auto json = nlohmann::json::parse(machine_text(gpu::known_devices().front()));
    json["weather"] = "fine";
    json["reached"]["weather"] = 1;
    EXPECT_EQ(parse_machine(json.dump(), "m.json"), gpu::known_devices().front());
}

TEST(MachineFile, RefusesWhatIsBrokenAndNamesThePlace) {
    struct Broken {
        const char* pointer;
        nlohmann::json value;
        const char* says;
    };
    const std::vector<Broken> all = {
        {"/schema", "latent-moe/tune/1", "is no machine: expected schema latent-moe/machine/1"},
        {"/name", 3, "machine: name is a JSON number, expected a string"},
        {"/memory_bytes_per_us", 0, "machine: memory_bytes_per_us is \"0\", expected a number from 0.001 to 1e+15"},
        {"/flops_per_us", "fast", "flops_per_us is"},
        {"/hop_us", -1, "hop_us is \"-1\""},
        {"/launch_us", nullptr, "launch_us is \"null\""},
        {"/reached", 3, "machine, reached: is a JSON number, expected an object"},
        {"/reached/contention", 1.5, "machine, reached: contention is \"1.5\", expected a number from 0 to 1"},
        {"/reached/early_tokens", 0.5, "early_tokens is"},
        {"/best/hop_us", -1, "machine, best: hop_us is"},
        {"/linked_ranks", 0, "linked_ranks is \"0\", expected a whole number from 1 to 16"},
        {"/fused", 1, "fused is \"1\", expected true or false"},
        {"/unmeasured", "hop_us", "unmeasured is no list"},
        {"/unmeasured/0", 3, "unmeasured holds"},
    };
    for (const Broken& broken : all) {
        MachineKind kind = gpu::known_devices().front();
        kind.unmeasured = {"hop_us"};
        auto json = nlohmann::json::parse(machine_text(kind));
        json[nlohmann::json::json_pointer(broken.pointer)] = broken.value;
        try {
            static_cast<void>(parse_machine(json.dump(), "m.json"));
            ADD_FAILURE() << broken.pointer << " was not refused";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), StatusCode::io);
            EXPECT_NE(std::string(error.what()).find(broken.says), std::string::npos) << error.what();
            EXPECT_EQ(std::string(error.what()).find("m.json"), 0U) << error.what();
        }
    }
}

}  // namespace
}  // namespace latent_moe::io
