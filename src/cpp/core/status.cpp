#include "loraaccel/status.h"

#include "traceback.h"

namespace loraaccel {

const char* status_code_name(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kShapeMismatch:
      return "shape mismatch";
    case StatusCode::kUnsupportedDtype:
      return "unsupported dtype";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kUnsupportedDevice:
      return "unsupported device";
    case StatusCode::kKernelUnavailable:
      return "kernel unavailable";
    case StatusCode::kOutOfMemory:
      return "out of memory";
    case StatusCode::kLenderFailed:
      return "lender failed";
    case StatusCode::kFileError:
      return "file error";
    case StatusCode::kMalformedFile:
      return "malformed file";
    case StatusCode::kInternal:
      return "internal error";
  }
  return "unknown status";
}

Status::Status(StatusCode code, std::string message, int error_number)
    : code_(code), error_number_(error_number), message_(std::move(message)) {
  if (!ok() && traceback_wanted()) traceback_ = capture_traceback(/*skip=*/1);
}

std::string Status::to_string() const {
  if (traceback_.empty()) return message_;
  return message_ + "\nnative stack (innermost first):\n" + traceback_;
}

}  // namespace loraaccel
