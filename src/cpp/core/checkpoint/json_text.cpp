#include "checkpoint/json_text.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace loraaccel {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

char* append_utf8(uint32_t code, char* to) {
  if (code < 0x80) {
    *to++ = static_cast<char>(code);
  } else if (code < 0x800) {
    *to++ = static_cast<char>(0xC0 | (code >> 6));
    *to++ = static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    *to++ = static_cast<char>(0xE0 | (code >> 12));
    *to++ = static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    *to++ = static_cast<char>(0x80 | (code & 0x3F));
  } else {
    *to++ = static_cast<char>(0xF0 | (code >> 18));
    *to++ = static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    *to++ = static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    *to++ = static_cast<char>(0x80 | (code & 0x3F));
  }
  return to;
}

// Bytes of the sequence that begins with `lead`, and the bounds of its second byte (RFC 3629, table 3-7 of Unicode).
int sequence_length(uint8_t lead, uint8_t* low, uint8_t* high) {
  *low = 0x80;
  *high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead == 0xE0) *low = 0xA0;
  if (lead == 0xED) *high = 0x9F;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead == 0xF0) *low = 0x90;
  if (lead == 0xF4) *high = 0x8F;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

}  // namespace

bool is_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  const uint8_t* end = p + text.size();
  while (p < end) {
    if (end - p >= 8) {
      uint64_t word;
      std::memcpy(&word, p, sizeof word);
      if ((word & 0x8080808080808080U) == 0) {
        p += 8;
        continue;
      }
    }
    if (*p < 0x80) {
      ++p;
      continue;
    }
    uint8_t low;
    uint8_t high;
    const int length = sequence_length(*p, &low, &high);
    if (length == 0 || end - p < length || p[1] < low || p[1] > high) return false;
    for (int i = 2; i < length; ++i) {
      if ((p[i] & 0xC0) != 0x80) return false;
    }
    p += length;
  }
  return true;
}

void append_json_string(std::string_view text, std::string* out) {
  constexpr const char* kHex = "0123456789abcdef";
  out->push_back('"');
  for (const char c : text) {
    switch (c) {
      case '"':
        out->append("\\\"");
        break;
      case '\\':
        out->append("\\\\");
        break;
      case '\b':
        out->append("\\b");
        break;
      case '\f':
        out->append("\\f");
        break;
      case '\n':
        out->append("\\n");
        break;
      case '\r':
        out->append("\\r");
        break;
      case '\t':
        out->append("\\t");
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          out->append("\\u00");
          out->push_back(kHex[c >> 4]);
          out->push_back(kHex[c & 15]);
        } else {
          out->push_back(c);
        }
    }
  }
  out->push_back('"');
}

void JsonCursor::skip_space() {
  while (next_ < end_ && (*next_ == ' ' || *next_ == '\n' || *next_ == '\t' || *next_ == '\r'))
    ++next_;
}

bool JsonCursor::fail(std::string_view expected) {
  if (!error_.empty()) return false;  // the first one is the cause
  error_ = "at byte " + std::to_string(next_ - begin_) + ": found ";
  if (next_ >= end_) {
    error_ += "the end";
  } else {
    const char* stop = next_;
    while (stop < end_ && stop - next_ < 20 && static_cast<uint8_t>(*stop) >= 0x20 &&
           static_cast<uint8_t>(*stop) < 0x7F)
      ++stop;
    error_ += stop == next_ ? "byte " + std::to_string(static_cast<uint8_t>(*next_))
                            : "'" + std::string(next_, static_cast<size_t>(stop - next_)) + "'";
  }
  error_ += ", expected ";
  error_ += expected;
  return false;
}

bool JsonCursor::take(char c) {
  skip_space();
  if (next_ >= end_ || *next_ != c) return false;
  ++next_;
  return true;
}

bool JsonCursor::expect(char c) { return take(c) || fail(std::string("'") + c + "'"); }

bool JsonCursor::at_end() {
  skip_space();
  return next_ >= end_;
}

char JsonCursor::peek() {
  skip_space();
  if (next_ >= end_) return '\0';
  return is_digit(*next_) || *next_ == '-' ? '0' : *next_;
}

bool JsonCursor::hex4(uint32_t* value) {
  if (end_ - next_ < 4) return fail("four hexadecimal digits");
  *value = 0;
  for (int i = 0; i < 4; ++i, ++next_) {
    const char c = *next_;
    const int digit = is_digit(c)            ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return fail("a hexadecimal digit");
    *value = *value << 4 | static_cast<uint32_t>(digit);
  }
  return true;
}

// next_ is past the backslash. What is decoded is never longer than what it was decoded from.
bool JsonCursor::escape(char** to) {
  if (next_ >= end_) return fail("an escaped character");
  static constexpr char kNames[] = "\"\\/bfnrt";
  static constexpr char kValues[] = "\"\\/\b\f\n\r\t";
  if (const char* known = *next_ == '\0' ? nullptr : std::strchr(kNames, *next_)) {
    ++next_;
    *(*to)++ = kValues[known - kNames];
    return true;
  }
  if (*next_ != 'u') return fail("an escape that JSON has");
  ++next_;
  uint32_t code = 0;
  if (!hex4(&code)) return false;
  if (code >= 0xD800 && code < 0xE000) {
    uint32_t low = 0;
    if (code >= 0xDC00 || end_ - next_ < 6 || next_[0] != '\\' || next_[1] != 'u')
      return fail("a pair of surrogates");
    next_ += 2;
    if (!hex4(&low)) return false;
    if (low < 0xDC00 || low >= 0xE000) return fail("a pair of surrogates");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  *to = append_utf8(code, *to);
  return true;
}

bool JsonCursor::string(std::string_view* out) {
  skip_space();
  if (next_ >= end_ || *next_ != '"') return fail("a string");
  char* from = ++next_;
  while (next_ < end_ && *next_ != '"' && *next_ != '\\' && static_cast<uint8_t>(*next_) >= 0x20)
    ++next_;
  char* to = next_;
  while (true) {
    if (next_ >= end_) return fail("a closing quote");
    const char c = *next_;
    if (static_cast<uint8_t>(c) < 0x20) return fail("no control character in a string");
    ++next_;
    if (c == '"') break;
    if (c != '\\') {
      *to++ = c;
    } else if (!escape(&to)) {
      return false;
    }
  }
  *out = {from, static_cast<size_t>(to - from)};
  return true;
}

bool JsonCursor::whole_number(uint64_t* out) {
  constexpr std::string_view kExpected = "a whole number from 0 to 2^64 - 1";
  skip_space();
  const char* p = next_;
  uint64_t value = 0;
  for (; p < end_ && is_digit(*p); ++p) {
    const auto digit = static_cast<uint64_t>(*p - '0');
    if (value > (UINT64_MAX - digit) / 10) return fail(kExpected);
    value = value * 10 + digit;
  }
  const bool leading_zero = p - next_ > 1 && *next_ == '0';
  const bool more = p < end_ && (*p == '.' || *p == 'e' || *p == 'E');
  if (p == next_ || leading_zero || more) return fail(kExpected);
  next_ += p - next_;
  *out = value;
  return true;
}

bool JsonCursor::literal(std::string_view word) {
  skip_space();
  if (static_cast<size_t>(end_ - next_) < word.size() ||
      std::memcmp(next_, word.data(), word.size()) != 0)
    return fail(word);
  next_ += word.size();
  return true;
}

bool JsonCursor::null() { return literal("null"); }

bool JsonCursor::skip_number() {
  char* p = next_;
  if (*p == '-') ++p;
  const char* digits = p;
  while (is_digit(*p)) ++p;
  if (p == digits || (*digits == '0' && p - digits > 1)) return fail("a number");
  if (*p == '.') {
    const char* fraction = ++p;
    while (is_digit(*p)) ++p;
    if (p == fraction) return fail("a number");
  }
  if (*p == 'e' || *p == 'E') {
    ++p;
    if (*p == '+' || *p == '-') ++p;
    const char* exponent = p;
    while (is_digit(*p)) ++p;
    if (p == exponent) return fail("a number");
  }
  if (std::isinf(std::strtod(next_, nullptr))) return fail("a number that a float64 holds");
  next_ = p;
  return true;
}

bool JsonCursor::skip_value(int depth) {
  if (depth > kMaxDepth) return fail("at most 64 levels of nesting");
  std::string_view text;
  switch (peek()) {
    case '"':
      return string(&text);
    case '0':
      return skip_number();
    case 't':
      return literal("true");
    case 'f':
      return literal("false");
    case 'n':
      return literal("null");
    case '[':
      if (!expect('[')) return false;
      if (take(']')) return true;
      do {
        if (!skip_value(depth + 1)) return false;
      } while (take(','));
      return expect(']');
    case '{':
      if (!expect('{')) return false;
      if (take('}')) return true;
      do {
        if (!string(&text) || !expect(':') || !skip_value(depth + 1)) return false;
      } while (take(','));
      return expect('}');
    default:
      return fail("a value");
  }
}

}  // namespace loraaccel
