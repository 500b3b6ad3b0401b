#include "images/headers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace loraaccel {
namespace {

// Numbers at a place in the bytes; zero beyond the end.
class Reader {
 public:
  explicit Reader(Bytes bytes) : bytes_(bytes) {}

  size_t size() const { return bytes_.size(); }
  uint32_t u8(size_t at) const { return at < bytes_.size() ? bytes_[at] : 0; }
  uint32_t le16(size_t at) const { return u8(at) | u8(at + 1) << 8; }
  uint32_t le32(size_t at) const { return le16(at) | le16(at + 2) << 16; }
  uint32_t be16(size_t at) const { return u8(at) << 8 | u8(at + 1); }
  uint32_t be32(size_t at) const { return be16(at) << 16 | be16(at + 2); }
  bool has(size_t at, const char* text, size_t count) const {
    return at <= size() && count <= size() - at &&
           std::memcmp(bytes_.data() + at, text, count) == 0;
  }
  // At most `count` bytes from `at`.
  Bytes part(size_t at, size_t count) const {
    if (at >= size()) return {};
    return bytes_.subspan(at, std::min(count, size() - at));
  }

 private:
  Bytes bytes_;
};

// Tag 0x0112 in the first directory of a TIFF structure; 1 where it is not there or says nothing.
int tiff_orientation(Bytes bytes) {
  const Reader r(bytes);
  const bool little = r.has(0, "II", 2);
  if (!little && !r.has(0, "MM", 2)) return 1;
  const auto u16 = [&](size_t at) { return little ? r.le16(at) : r.be16(at); };
  const auto u32 = [&](size_t at) { return little ? r.le32(at) : r.be32(at); };
  const size_t directory = u32(4);
  if (u16(2) != 42 || directory >= r.size()) return 1;
  const size_t count = u16(directory);
  for (size_t i = 0; i < count && directory + 2 + 12 * i + 12 <= r.size(); ++i) {
    const size_t entry = directory + 2 + 12 * i;
    if (u16(entry) != 0x0112) continue;
    const uint32_t value = u16(entry + 2) == 3 ? u16(entry + 8) : u32(entry + 8);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

constexpr const char* kFormatNames[] = {"", "PNG", "JPEG", "WebP", "BMP"};

bool is_frame(uint32_t marker) {
  return marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
}

}  // namespace

JpegFacts read_jpeg_facts(Bytes bytes) {
  const Reader r(bytes);
  JpegFacts facts;
  size_t at = 2;
  while (at + 2 <= r.size()) {
    if (r.u8(at) != 0xFF) return facts;
    const uint32_t marker = r.u8(at + 1);
    if (marker == 0xFF) {  // filling
      ++at;
      continue;
    }
    if (marker == 0xD9) {
      facts.complete = facts.frame != 0;
      return facts;
    }
    if (marker == 0x01 || (marker >= 0xD0 && marker <= 0xD7)) {  // markers without a length
      at += 2;
      continue;
    }
    const size_t length = r.be16(at + 2);
    if (length < 2 || length > r.size() - at - 2) {
      // A frame's size is in its first bytes: good enough for a beginning of a file.
      if (!is_frame(marker) || r.size() - at < 10) return facts;
    }
    if (is_frame(marker) && facts.frame == 0) {
      facts.frame = static_cast<int>(marker);
      facts.precision = static_cast<int>(r.u8(at + 4));
      facts.size = {r.be16(at + 7), r.be16(at + 5)};
      facts.components = static_cast<int>(r.u8(at + 9));
    }
    if (marker == 0xE1 && r.has(at + 4, "Exif\0\0", 6) && facts.orientation == 1)
      facts.orientation = tiff_orientation(r.part(at + 10, length - 8));
    at += 2 + length;
    if (marker != 0xDA) continue;
    // Compressed data up to the next marker; FF 00 is a byte of it, and restart markers belong to it.
    while (at + 1 < r.size()) {
      const Bytes rest = r.part(at, r.size() - at);
      const void* found = std::memchr(rest.data(), 0xFF, rest.size() - 1);
      if (found == nullptr) return facts;
      at += static_cast<size_t>(static_cast<const uint8_t*>(found) - rest.data());
      const uint32_t next = r.u8(at + 1);
      if (next != 0 && next != 0xFF && (next < 0xD0 || next > 0xD7)) break;
      at += next == 0xFF ? 1 : 2;
    }
  }
  return facts;
}

PngFacts read_png_facts(Bytes bytes) {
  const Reader r(bytes);
  PngFacts facts;
  if (!r.has(12, "IHDR", 4) || r.size() < 26) return facts;
  facts.size = {r.be32(16), r.be32(20)};
  facts.depth = static_cast<int>(r.u8(24));
  facts.color = static_cast<int>(r.u8(25));
  for (size_t at = 8; at + 12 <= r.size();) {
    const size_t length = r.be32(at);
    if (length > 0x7FFFFFFF || length > r.size() - at - 12) return facts;
    if (r.has(at + 4, "PLTE", 4)) facts.palette = static_cast<int>(length / 3);
    if (r.has(at + 4, "tRNS", 4)) facts.transparency = true;
    if (r.has(at + 4, "acTL", 4)) facts.animated = true;
    if (r.has(at + 4, "eXIf", 4)) facts.orientation = tiff_orientation(r.part(at + 8, length));
    if (r.has(at + 4, "IEND", 4)) {
      facts.complete = true;
      return facts;
    }
    at += 12 + length;
  }
  return facts;
}

WebpFacts read_webp_facts(Bytes bytes) {
  const Reader r(bytes);
  WebpFacts facts;
  facts.complete = r.size() >= 12 && r.size() - 8 >= r.le32(4);
  if (r.has(12, "VP8 ", 4) && r.size() >= 30) {
    facts.size = {r.le16(26) & 0x3FFF, r.le16(28) & 0x3FFF};
  } else if (r.has(12, "VP8L", 4) && r.size() >= 25) {
    const uint32_t bits = r.le32(21);
    facts.size = {(bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1};
    facts.alpha = (bits >> 28 & 1) != 0;
  } else if (r.has(12, "VP8X", 4) && r.size() >= 30) {
    facts.size = {(r.le32(24) & 0xFFFFFF) + 1, (r.le16(27) | r.u8(29) << 16) + 1};
    facts.alpha = (r.u8(20) & 0x10) != 0;
    facts.animated = (r.u8(20) & 0x02) != 0;
    for (size_t at = 12; at + 8 <= r.size();) {
      const size_t length = r.le32(at + 4);
      if (r.has(at, "EXIF", 4)) {
        const size_t skip = r.has(at + 8, "Exif\0\0", 6) ? 6 : 0;
        facts.orientation = tiff_orientation(r.part(at + 8 + skip, length));
      }
      if (length > r.size() - at - 8) break;
      at += 8 + length + length % 2;
    }
  }
  return facts;
}

ImageFormat image_format(Bytes bytes) {
  const Reader r(bytes);
  if (r.has(0, "\x89PNG\r\n\x1A\n", 8)) return ImageFormat::kPng;
  if (r.has(0, "\xFF\xD8\xFF", 3)) return ImageFormat::kJpeg;
  if (r.has(0, "RIFF", 4) && r.has(8, "WEBP", 4)) return ImageFormat::kWebp;
  if (r.has(0, "BM", 2)) return ImageFormat::kBmp;
  return ImageFormat::kUnknown;
}

Status read_image_header(std::span<const uint8_t> bytes, ImageHeader* out) {
  *out = {};
  const Reader r(bytes);
  out->format = image_format(bytes);
  switch (out->format) {
    case ImageFormat::kPng: {
      const PngFacts facts = read_png_facts(bytes);
      out->size = facts.size;
      out->orientation = facts.orientation;
      break;
    }
    case ImageFormat::kJpeg: {
      const JpegFacts facts = read_jpeg_facts(bytes);
      out->size = facts.size;
      out->orientation = facts.orientation;
      break;
    }
    case ImageFormat::kWebp: {
      const WebpFacts facts = read_webp_facts(bytes);
      out->size = facts.size;
      out->orientation = facts.orientation;
      break;
    }
    case ImageFormat::kBmp:
      if (r.le32(14) == 12) {  // the header of OS/2
        out->size = {r.le16(18), r.le16(20)};
      } else {  // a negative height: rows from top to bottom
        out->size = {static_cast<int32_t>(r.le32(18)),
                     std::abs(static_cast<int64_t>(static_cast<int32_t>(r.le32(22))))};
      }
      break;
    case ImageFormat::kUnknown:
      return {};
  }
  if (out->size.width > 0 && out->size.height > 0) return {};
  out->size = {};
  return Status(StatusCode::kMalformedFile,
                std::string("image: a ") + kFormatNames[static_cast<int>(out->format)] +
                    " file of " + std::to_string(bytes.size()) +
                    " bytes that says no size, or zero, expected a size in its header");
}

}  // namespace loraaccel
