#include "traceback.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#if defined(__GLIBC__) || defined(__APPLE__)
#define LORAACCEL_HAVE_DLADDR 1
#include <cxxabi.h>
#include <dlfcn.h>
#include <unwind.h>
#endif
#ifdef LORAACCEL_HAVE_LIBBACKTRACE
#include <backtrace.h>
#pragma weak backtrace_create_state
#pragma weak backtrace_pcinfo
#endif

namespace loraaccel {

bool traceback_wanted() {
  const char* value = std::getenv("LORAACCEL_TRACEBACK");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

#ifndef LORAACCEL_HAVE_DLADDR

std::string capture_traceback(int) { return "(no stack unwinding on this platform)"; }

#else

namespace {

constexpr int kMaxFrames = 48;

struct Frames {
  uintptr_t pc[kMaxFrames];
  int count = 0;
  int skip = 0;
};

_Unwind_Reason_Code collect(_Unwind_Context* context, void* data) {
  auto* frames = static_cast<Frames*>(data);
  if (frames->skip > 0) {
    --frames->skip;
    return _URC_NO_REASON;
  }
  // A return address points behind the call; one less lies inside it.
  const uintptr_t pc = _Unwind_GetIP(context);
  if (pc == 0 || frames->count == kMaxFrames) return _URC_END_OF_STACK;
  frames->pc[frames->count++] = pc - 1;
  return _URC_NO_REASON;
}

std::string demangled(const char* symbol) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : symbol;
}

struct Line {
  std::string function;
  std::string file;
  int line = 0;
};

#ifdef LORAACCEL_HAVE_LIBBACKTRACE

void ignore_error(void*, const char*, int) {
}  // no debug information: the line stays without file and line

int store_line(void* data, uintptr_t, const char* file, int line, const char* function) {
  auto* out = static_cast<Line*>(data);
  if (file != nullptr) {
    out->file = file;
    out->line = line;
  }
  if (function != nullptr) out->function = demangled(function);
  return 1;  // the innermost inlined function is enough
}

Line debug_line(uintptr_t pc) {
  Line line;
  if (backtrace_create_state == nullptr) return line;  // the program does not link libbacktrace
  static backtrace_state* const state =
      backtrace_create_state(nullptr, /*threaded=*/1, ignore_error, nullptr);
  if (state != nullptr) backtrace_pcinfo(state, pc, store_line, ignore_error, &line);
  return line;
}

#else

Line debug_line(uintptr_t) { return {}; }

#endif

std::string describe_frame(int index, uintptr_t pc) {
  Line line = debug_line(pc);
  Dl_info where{};
  const bool found = dladdr(reinterpret_cast<void*>(pc), &where) != 0;
  if (line.function.empty() && found && where.dli_sname != nullptr) {
    line.function = demangled(where.dli_sname);
  }
  std::string text =
      "#" + std::to_string(index) + " " + (line.function.empty() ? "??" : line.function);
  if (!line.file.empty()) text += " at " + line.file + ":" + std::to_string(line.line);
  if (found && where.dli_fname != nullptr) {
    const char* slash = std::strrchr(where.dli_fname, '/');
    char offset[32];
    std::snprintf(offset, sizeof offset, "+0x%zx",
                  static_cast<size_t>(pc - reinterpret_cast<uintptr_t>(where.dli_fbase)));
    text += std::string(" (") + (slash != nullptr ? slash + 1 : where.dli_fname) + offset + ")";
  }
  return text;
}

}  // namespace

std::string capture_traceback(int skip) {
  Frames frames;
  frames.skip = skip + 1;
  _Unwind_Backtrace(collect, &frames);
  std::string text;
  for (int i = 0; i < frames.count; ++i) {
    if (i != 0) text += '\n';
    text += describe_frame(i, frames.pc[i]);
  }
  return text;
}

#endif

}  // namespace loraaccel
