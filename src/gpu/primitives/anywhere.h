// Functions that the host and the device both call.
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
#define LATENT_MOE_ANYWHERE __host__ __device__
#else
#define LATENT_MOE_ANYWHERE
#endif
