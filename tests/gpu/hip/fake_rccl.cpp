// Stands for librccl: writes down what was asked for.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "fake_log.h"
#include "gpu/runtime/rccl_api.h"

using latent_moe::fake::log;

struct ncclComm {
    int world, rank, device;
};

LATENT_MOE_FAKE ncclResult_t ncclGetVersion(int* version) {
    *version = std::getenv("FAKE_RCCL_VERSION") != nullptr ? std::atoi(std::getenv("FAKE_RCCL_VERSION")) : 21803;
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::memset(id, 7, sizeof *id);
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world, ncclUniqueId id, int rank,
                                                    ncclConfig_t* config) {
    *comm = new ncclComm{world, rank, rank};
    log(fmt::format("ncclCommInitRankConfig world {} rank {} id {} config {:#x} {} splitShare {}", world, rank,
                    static_cast<int>(id.internal[127]), config->magic, config->size == sizeof *config, config->splitShare));
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    log("ncclCommDestroy");
    // As long as a peer that is stopped would keep it waiting.
    if (const char* ms = std::getenv("FAKE_RCCL_DESTROY_MS"))
        std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(ms)));
    log("ncclCommDestroy ends");
    delete comm;
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommAbort(ncclComm_t comm) {
    log("ncclCommAbort");
    delete comm;
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* result, ncclConfig_t*) {
    log(fmt::format("ncclCommSplit color {} key {}", color, key));
    *result = new ncclComm(*comm);
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    *count = comm->world;
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
    *device = comm->device;
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
LATENT_MOE_FAKE const char* ncclGetErrorString(ncclResult_t) {
    return "an error of the fake library";
}
LATENT_MOE_FAKE const char* ncclGetLastError(ncclComm_t) {
    return "";
}
LATENT_MOE_FAKE ncclResult_t ncclAllReduce(const void*, void*, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                                           ncclComm_t, hipStream_t) {
    log(fmt::format("ncclAllReduce count {} type {} op {}", count, static_cast<int>(type), static_cast<int>(op)));
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclAllGather(const void*, void*, std::size_t count, ncclDataType_t type, ncclComm_t,
                                           hipStream_t) {
    log(fmt::format("ncclAllGather count {} type {}", count, static_cast<int>(type)));
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclSend(const void*, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                      hipStream_t) {
    log(fmt::format("ncclSend rank {} to {} count {} type {}", comm->rank, peer, count, static_cast<int>(type)));
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclRecv(void*, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                      hipStream_t) {
    log(fmt::format("ncclRecv rank {} from {} count {} type {}", comm->rank, peer, count, static_cast<int>(type)));
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclGroupStart() {
    log("ncclGroupStart");
    return ncclSuccess;
}
LATENT_MOE_FAKE ncclResult_t ncclGroupEnd() {
    log("ncclGroupEnd");
    return ncclSuccess;
}
