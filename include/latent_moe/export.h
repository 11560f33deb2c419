// What is visible outside the shared library.
#pragma once

#define LATENT_MOE_API [[gnu::visibility("default")]]
