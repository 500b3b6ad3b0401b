// LORAACCEL_API marks what libloraaccel exports. The static core needs no marking; a shared build of it would.
#pragma once

#if defined(_WIN32)
#define LORAACCEL_API
#else
#define LORAACCEL_API __attribute__((visibility("default")))
#endif
