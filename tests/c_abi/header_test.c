/* The C header is C: this file is compiled as C11, and each struct begins with its size. */
#include <latent_moe/latent_moe_c.h>

#include <stddef.h>

_Static_assert(offsetof(latent_moe_shape, struct_size) == 0, "shape");
_Static_assert(offsetof(latent_moe_options, struct_size) == 0, "options");
_Static_assert(offsetof(latent_moe_weights, struct_size) == 0, "weights");
_Static_assert(offsetof(latent_moe_input, struct_size) == 0, "input");
_Static_assert(offsetof(latent_moe_fault, struct_size) == 0, "fault");
/* The first version's sizes never shrink: a program that was built with it must go on working. */
_Static_assert(sizeof(latent_moe_shape) >= 40, "shape");
_Static_assert(sizeof(latent_moe_options) >= 120, "options");
_Static_assert(sizeof(latent_moe_weights) >= 48, "weights");
_Static_assert(sizeof(latent_moe_input) >= 80, "input");
_Static_assert(sizeof(latent_moe_fault) >= 48, "fault");

int latent_moe_header_is_c(void);
int latent_moe_header_is_c(void) {
    return latent_moe_abi_version() == LATENT_MOE_ABI_VERSION;
}
