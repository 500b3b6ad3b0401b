#include "checkpoint/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace loraaccel::test {
namespace {

std::string hash(Sha256Blocks blocks, const std::string& text, size_t piece) {
  Sha256 sha(blocks);
  for (size_t at = 0; at < text.size(); at += piece)
    sha.update(text.data() + at, std::min(piece, text.size() - at));
  return hex_text(sha.finish());
}

// FIPS 180-4 and its examples.
TEST(Sha256, KnownDigests) {
  for (const Sha256Variant& v : sha256_variants()) {
    if (v.blocks == nullptr) continue;
    SCOPED_TRACE(v.name);
    EXPECT_EQ(hash(v.blocks, "", 1),
              "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(hash(v.blocks, "abc", 3),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(hash(v.blocks, "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(hash(v.blocks, std::string(100'000, 'a'), 4096),
              "6d1cf22d7cc09b085dfc25ee1a1f3ae0265804c607bc2074ad253bcc82fd81ee");
  }
}

TEST(Sha256, VariantsAgreeForEveryLengthAndAlignment) {
  std::string text(400, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i + 31 * i);
  const Sha256Blocks plain = sha256_variants().back().blocks;
  ASSERT_NE(plain, nullptr);
  for (size_t length = 0; length < 260; ++length) {
    const std::string part = text.substr(length % 7, length);
    const std::string expected = hash(plain, part, 1);
    for (const Sha256Variant& v : sha256_variants()) {
      if (v.blocks == nullptr) continue;
      for (const size_t piece : {63U, 64U, 65U, 1000U})
        ASSERT_EQ(hash(v.blocks, part, piece), expected) << v.name << " " << length << " " << piece;
    }
  }
}

TEST(Sha256, DefaultIsTheFirstThatThereIs) {
  Sha256 sha;
  sha.update("abc", 3);
  EXPECT_EQ(hex_text(sha.finish()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace loraaccel::test
