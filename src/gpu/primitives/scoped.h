// Loads, stores and fences that name the memory order and the set of threads it holds for.
//
// GUARANTEE. Every access here is *strong* in the sense of the PTX memory model: two threads inside each other's scope that
// access the same word with these functions do not race, and a word of up to 8 bytes is never torn. A 16-byte `uint4`
// access is four such 4-byte words in no particular order; `*_whole16` is one access of 16 bytes. `relaxed` orders nothing
// else; `acquire` and `release` order everything that the thread did after or before, and what happened before that.
#pragma once

#include "target.h"
