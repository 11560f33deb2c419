// Host: describes strided rows of 2-byte elements to the tensor copy engine, in boxes with the 128-byte swizzle.
//
// GUARANTEE. A pure function of its arguments: it touches neither the device nor the memory that it describes, so it may run
// during capture. The map travels as a kernel argument and is frozen in a graph like any pointer.
#pragma once

#include <cstdint>

#include <cuda.h>  // types only: the driver's function is looked up at run time
#include <cuda_runtime.h>

namespace latent_moe::gpu {

/// Rows of `columns` elements, `stride` bytes apart; boxes of 64 columns × `box_rows`.
inline cudaError_t describe_rows(CUtensorMap& map, const void* data, std::int64_t rows, std::int64_t columns,
                                 std::int64_t stride, int box_rows) {
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        return error == cudaSuccess && found == cudaDriverEntryPointSuccess
                   ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
                   : nullptr;
    }();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t size[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
    const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
    const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(data), size, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace latent_moe::gpu
