// Compiled with the flags of this target; see ceilings-inl.h.
#define LORAACCEL_TARGET avx2
#include "cpu/ceilings-inl.h"
