// The JSON of a safetensors header, in and out: a strict cursor over text, and the escapes of strings.
//
// Not nlohmann-json, which the core has for other texts: opening a file is mostly this. Strings are decoded where they
// lie, so that a header of 2000 tensors is read without an allocation for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace loraaccel {

bool is_utf8(std::string_view text);

// A string in quotes: escapes are \" \\ \b \f \n \r \t and \u00xx for other control characters; the rest is as it is.
void append_json_string(std::string_view text, std::string* out);

// Goes forward through [begin, end), which must be UTF-8 and is followed by a null byte. Each function skips white space
// first, and returns false, having set error(), where the text is not what was asked for.
class JsonCursor {
 public:
  static constexpr int kMaxDepth = 64;

  JsonCursor(char* begin, char* end) : begin_(begin), next_(begin), end_(end) {}

  // True, and past it, where the next character is `c`; else nothing happens.
  bool take(char c);
  bool expect(char c);
  bool at_end();
  // What the next value begins with: one of { [ " 0 (a number) t f n, or another character; '\0' at the end.
  char peek();

  // Decodes the string in place.
  bool string(std::string_view* out);
  // A whole number from 0 to 2^64 - 1, without a fraction or an exponent.
  bool whole_number(uint64_t* out);
  bool null();
  // Any value, checked and passed over.
  bool skip_value() { return skip_value(1); }

  // "at byte 17: found '-4', expected ..."
  const std::string& error() const { return error_; }
  bool fail(std::string_view expected);

 private:
  void skip_space();
  bool skip_value(int depth);
  bool skip_number();
  bool literal(std::string_view word);
  bool escape(char** to);
  bool hex4(uint32_t* value);

  char* begin_;
  char* next_;
  char* end_;
  std::string error_;
};

}  // namespace loraaccel
