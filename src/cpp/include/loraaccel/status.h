// How the core reports failure: a value, never an exception, a print or an abort.
#pragma once

#include <string>
#include <utility>

namespace loraaccel {

enum class StatusCode : int {
  kOk = 0,
  kShapeMismatch,      // sizes of two operands do not fit
  kUnsupportedDtype,   // an element type, or a combination of them, that no kernel takes
  kInvalidArgument,    // a scalar out of range, a null pointer, an output that overlaps an input
  kUnsupportedDevice,  // operands on a device that this build has no kernel for
  kKernelUnavailable,  // LORAACCEL_FORCE_KERNEL names a kernel that is unknown or declined the call
  kOutOfMemory,        // the context's allocator returned null
  kLenderFailed,       // a function that the host lent (GEMM, a tensor's bytes) reported a failure
  kFileError,      // the operating system refused an operation on a file: error_number() says why
  kMalformedFile,  // a file whose content is not what its format says
  kInternal,       // a bug in loraaccel
};

// A constant, lower-case phrase such as "shape mismatch". Never null.
const char* status_code_name(StatusCode code) noexcept;

// An outcome. Ok costs no allocation; a failure owns its message, which reads
// "<operator>: <argument> <what was found>, expected <what was wanted>".
// With LORAACCEL_TRACEBACK=1 in the environment a failure also holds the native stack at its origin.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, int error_number = 0);

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }
  // errno of the refused operation; 0 where no operation was refused.
  int error_number() const noexcept { return error_number_; }
  // Empty, or one line per frame: "#2 function at file:line (library)".
  const std::string& traceback() const noexcept { return traceback_; }
  // message(), and under it the traceback where there is one.
  std::string to_string() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  int error_number_ = 0;
  std::string message_;
  std::string traceback_;
};

}  // namespace loraaccel

// Returns from the calling function when `expression` is a failure.
#define LORAACCEL_RETURN_IF_ERROR(expression)   \
  do {                                          \
    ::loraaccel::Status status_ = (expression); \
    if (!status_.ok()) return status_;          \
  } while (false)
