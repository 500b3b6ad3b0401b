#include "operand_checks.h"

namespace loraaccel {

// Out of line: every message comes through here, and its frame begins the native stack.
Status OperandChecker::fail(StatusCode code, const std::string& text) const {
  const std::string where = layer_.empty() ? "" : layer_ + ": ";
  return Status(code, std::string(op_) + ": " + where + text);
}

}  // namespace loraaccel
