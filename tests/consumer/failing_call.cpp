// Makes a call that is refused and prints why: a message, and the native stack where LORAACCEL_TRACEBACK asks for it.
#include <loraaccel/lora_linear.h>

#include <cstdio>

int main() {
  const loraaccel::Status status = loraaccel::lora_linear_forward(loraaccel::default_context(), {});
  std::printf("%s\n", status.to_string().c_str());
  return status.code() == loraaccel::StatusCode::kShapeMismatch ? 0 : 1;
}
