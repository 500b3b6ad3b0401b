// What is accepted and what is refused, and what the messages say: format rules and the fault cases VR1 to VR7.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/safetensors_header.h"
#include "loraaccel/safetensors.h"
#include "support/files.h"

namespace loraaccel::test {
namespace {

Status open_bytes(const std::string& bytes, SafetensorsReader* reader) {
  return SafetensorsReader::from_memory(bytes.data(), bytes.size(), "x.safetensors", reader);
}

Status open_bytes(const std::string& bytes) {
  SafetensorsReader reader;
  return open_bytes(bytes, &reader);
}

void expect_refused(const std::string& bytes, const std::vector<std::string>& said) {
  const Status status = open_bytes(bytes);
  ASSERT_EQ(status.code(), StatusCode::kMalformedFile) << bytes.substr(0, 200);
  EXPECT_EQ(status.message().find("x.safetensors: "), 0U);
  for (const std::string& part : said)
    EXPECT_NE(status.message().find(part), std::string::npos)
        << status.message() << "\nlacks " << part;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

std::string with(const std::string& fields, size_t data_bytes) {
  return file_of("{" + fields + "}", data_bytes);
}

TEST(SafetensorsHeader, GoldenFile) {
  const std::string json =
      R"({"__metadata__":{"ss_x":"1"},"c":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
      R"("d":{"dtype":"F32","shape":[0,3],"data_offsets":[16,16]},)"
      R"("a":{"dtype":"F16","shape":[2],"data_offsets":[16,20]},)"
      R"("e":{"dtype":"BOOL","shape":[2],"data_offsets":[20,22]}} )";
  ASSERT_EQ(json.size(), 304U);
  SafetensorsReader file;
  const std::string bytes = file_of(json, 22);
  ASSERT_TRUE(open_bytes(bytes, &file).ok());
  EXPECT_EQ(file.entries().size(), 5U);
  EXPECT_EQ(file.data_offset(), 312U);
  EXPECT_EQ(file.file_size(), bytes.size());
  EXPECT_TRUE(file.has_metadata());
  ASSERT_EQ(file.metadata().size(), 1U);
  EXPECT_EQ(file.metadata()[0].key, "ss_x");
  EXPECT_EQ(file.metadata()[0].value, "1");
  const TensorEntry* d = file.find("d");
  ASSERT_NE(d, nullptr);
  EXPECT_EQ(d->dtype, FileDType::kF32);
  EXPECT_EQ(shape_text(d->shape), "[0, 3]");
  EXPECT_EQ(d->size_bytes(), 0U);
  EXPECT_TRUE(file.find("c")->shape.empty());
  std::string names;
  for (const uint32_t i : file.by_name()) names += file.entries()[i].name;
  EXPECT_EQ(names, "abcde");
  EXPECT_EQ(file.find("f"), nullptr);
  EXPECT_EQ(file.find(""), nullptr);
}

TEST(SafetensorsHeader, UpstreamVectors) {
  const std::string json = R"({"test":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}})";
  ASSERT_EQ(json.size(), 60U);
  EXPECT_TRUE(open_bytes(file_of(json, 16)).ok());
  expect_refused(file_of(json, 14), {"incomplete", "84", "82"});
  EXPECT_TRUE(open_bytes(length_prefix(6) + "{}\r \t\n").ok());
  EXPECT_TRUE(open_bytes(length_prefix(2) + "{}").ok());
  expect_refused(with(entry("t", "F32", "[2,18446744073709551614]", "[0,16]"), 16), {"'t'"});
  expect_refused(with(entry("t", "F32", "[2,9223372036854775807]", "[0,16]"), 16), {"'t'", "2^64"});
}

TEST(SafetensorsHeader, VR1TruncatedShortAndOverLong) {
  expect_refused("", {"0 bytes", "incomplete"});
  expect_refused("\x10\0\0\0\0\0"[0] + std::string(6, '\0'), {"7 bytes", "incomplete"});
  expect_refused(length_prefix(100) + "{}", {"8 + 100", "found 10", "incomplete"});
  const std::string one = entry("a", "U8", "[16]", "[0,16]");
  const size_t n = one.size() + 2;
  expect_refused(with(one, 15),
                 {"8 + " + std::to_string(n) + " + 16", std::to_string(n + 23), "incomplete"});
  expect_refused(with(one, 17),
                 {"8 + " + std::to_string(n) + " + 16", std::to_string(n + 25), "after the last"});
}

TEST(SafetensorsHeader, VR2HostileLength) {
  const std::string rest(100, ' ');
  for (const uint64_t n : {uint64_t{1} << 63, UINT64_MAX, UINT64_MAX - 7, uint64_t{100'000'001}})
    expect_refused(length_prefix(n) + rest, {"header of " + std::to_string(n)});
  expect_refused(length_prefix(101) + rest, {"found 108"});
  expect_refused(length_prefix(100'000'000) + rest, {"found 108"});
}

TEST(SafetensorsHeader, VR3OverlapsAndHoles) {
  const auto a = entry("a", "F32", "[3]", "[0,12]");
  expect_refused(with(a + "," + entry("b", "F32", "[2]", "[8,16]"), 16), {"'a'", "'b'", "overlap"});
  expect_refused(
      with(entry("a", "F32", "[4]", "[0,16]") + "," + entry("b", "F32", "[4]", "[0,16]"), 16),
      {"'a'", "'b'", "overlap"});
  expect_refused(with(entry("a", "F32", "[3]", "[4,16]"), 16), {"'a'", "byte 4", "hole"});
  expect_refused(with(a + "," + entry("b", "F32", "[1]", "[16,20]"), 20), {"'a'", "'b'", "hole"});
  SafetensorsReader file;
  const std::string reversed =
      with(entry("b", "U8", "[8]", "[8,16]") + "," + entry("a", "U8", "[8]", "[0,8]"), 16);
  ASSERT_TRUE(open_bytes(reversed, &file).ok());
  EXPECT_EQ(file.entries()[0].name, "a");
}

TEST(SafetensorsHeader, VR4RangeMustMatchShapeAndDtype) {
  expect_refused(with(entry("t", "F32", "[5]", "[0,16]"), 16), {"'t'", "16 bytes", "20 bytes"});
  expect_refused(with(entry("t", "F32", "[1000,1000]", "[0,4]"), 4),
                 {"'t'", "4 bytes", "4000000 bytes"});
  expect_refused(with(entry("t", "F32", "[4]", "[16,0]"), 16), {"'t'", "begin at 16", "end at 0"});
  for (const char* offsets :
       {"[-4,12]", "[0,16.0]", "[0,16,0]", "[0]", "[]", "[\"0\",\"16\"]", "[0,1e1]", "{\"0\":16}",
        "null", "[00,16]", "[0,18446744073709551616]"})
    expect_refused(with(entry("t", "F32", "[4]", offsets), 16), {"'t'", "expected"});
  for (const char* shape : {"[-1]", "[4.0]", "[\"4\"]", "4", "[[4]]", "null", "[4,]", "[true]"})
    expect_refused(with(entry("t", "F32", shape, "[0,16]"), 16), {"'t'", "expected"});
  expect_refused(with(entry("t", "F4", "[3]", "[0,1]"), 1), {"'t'", "whole number of bytes"});
  EXPECT_TRUE(open_bytes(with(entry("t", "F4", "[3,2]", "[0,3]"), 3)).ok());
  EXPECT_TRUE(open_bytes(with(entry("t", "F6_E2M3", "[4]", "[0,3]"), 3)).ok());
  for (const char* dtype : {"f32", "F33", "", "float32"})
    expect_refused(with(entry("t", dtype, "[4]", "[0,16]"), 16), {"'t'", "dtype"});
}

TEST(SafetensorsHeader, VR5ScalarsAndEmptyTensors) {
  SafetensorsReader file;
  const std::string bytes =
      with(entry("s", "F32", "[]", "[0,4]") + "," + entry("e0", "F32", "[0]", "[4,4]") + "," +
               entry("e1", "F32", "[2,0]", "[4,4]") + "," + entry("e2", "U8", "[0,3]", "[4,4]"),
           4);
  ASSERT_TRUE(open_bytes(bytes, &file).ok());
  EXPECT_EQ(file.find("s")->size_bytes(), 4U);
  EXPECT_EQ(shape_text(file.find("e1")->shape), "[2, 0]");
  EXPECT_EQ(shape_text(file.find("e2")->shape), "[0, 3]");
  void* data = nullptr;
  EXPECT_TRUE(file.view(*file.find("e1"), &data).ok());
  EXPECT_TRUE(file.read(*file.find("e1"), 0, 0, nullptr).ok());
  // An empty tensor where there is a hole is as wrong as another.
  expect_refused(with(entry("e", "F32", "[0]", "[4,4]"), 4), {"'e'", "hole"});
}

TEST(SafetensorsHeader, VR6MetadataForms) {
  const std::string t = entry("t", "U8", "[1]", "[0,1]");
  struct Form {
    std::string fields;
    bool present;
    size_t items;
  };
  for (const Form& form : {Form{t, false, 0}, Form{"\"__metadata__\":{}," + t, true, 0},
                           Form{"\"__metadata__\":null," + t, false, 0},
                           Form{"\"__metadata__\":{\"k\":\"v\"}," + t, true, 1},
                           Form{t + ",\"__metadata__\":{\"k\":\"v\",\"l\":\"\"}", true, 2}}) {
    SafetensorsReader file;
    const std::string bytes = with(form.fields, 1);
    ASSERT_TRUE(open_bytes(bytes, &file).ok()) << form.fields;
    EXPECT_EQ(file.has_metadata(), form.present);
    EXPECT_EQ(file.metadata().size(), form.items);
    EXPECT_EQ(file.entries().size(), 1U) << "metadata is no tensor";
    EXPECT_EQ(file.find("__metadata__"), nullptr);
  }
  EXPECT_TRUE(open_bytes(with("\"__metadata__\":{\"k\":\"v\"}", 0)).ok());
  for (const char* value : {"1", "{}", "[\"v\"]", "null", "true", "1.5"})
    expect_refused(with("\"__metadata__\":{\"k\":" + std::string(value) + "}," + t, 1),
                   {"__metadata__", "key 'k'", "a string"});
  expect_refused(with("\"__metadata__\":[]," + t, 1), {"__metadata__"});
  expect_refused(with("\"__metadata__\":{},\"__metadata__\":{}," + t, 1), {"twice"});
  expect_refused(with("\"__metadata__\":{\"k\":\"a\",\"k\":\"b\"}," + t, 1), {"'k'", "twice"});
}

TEST(SafetensorsHeader, VR7OtherFormats) {
  const std::string tail(64, 'x');
  expect_refused("PK\x03\x04" + tail, {"zip archive"});
  expect_refused("\x80\x02}q" + tail, {"pickle"});
  expect_refused("GGUF\x03" + tail, {"GGUF"});
  expect_refused("<html><body>404" + tail, {"web page"});
  expect_refused("<!DOCTYPE html>" + tail, {"web page"});
  expect_refused("version https://git-lfs.github.com/spec/v1\noid sha256:0", {"Git LFS"});
  expect_refused("{\"weight_map\": {}}" + tail, {"JSON"});
  for (const char* start : {"PK\x03\x04", "GGUF", "<html>", "version https://git-lfs"})
    EXPECT_EQ(open_bytes(start + tail).message().find("header of"), std::string::npos);
  // A header of 123 bytes: its length begins with '{' and is none of these.
  std::string json = "{" + entry("t", "U8", "[1]", "[0,1]");
  json += std::string(122 - json.size(), ' ') + "}";
  ASSERT_EQ(json.size(), 123U);
  EXPECT_TRUE(open_bytes(file_of(json, 1)).ok());
}

TEST(SafetensorsHeader, JsonRules) {
  const std::string t = entry("t", "U8", "[1]", "[0,1]");
  for (
      const std::string& json :
      {"{" + t + "} ", " {" + t + "}", "\n\t{ " + t + " }\r\n",
       R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[{"a":[1.5e3,true,null,"\u00e9"]}]}})" +
           std::string(),
       R"({"t":{"data_offsets":[0,1],"shape":[1],"dtype":"\u0055\u0038"}})" + std::string()})
    EXPECT_TRUE(open_bytes(file_of(json, 1)).ok())
        << json << open_bytes(file_of(json, 1)).message();
  for (const std::string& json : std::vector<std::string>{
           "[" + t + "]", "{" + t + "}\0" + std::string(1, '\0'), "{" + t, "{" + t + ",}", "{,}",
           "{" + t + "}}", "{'t':1}", std::string("null"), std::string(""),
           std::string("\xEF\xBB\xBF{}"),
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":01}})" + std::string(),
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1e999}})" + std::string(),
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":NaN}})" + std::string(),
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":"\x"}})" + std::string(),
           R"({"\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})" + std::string(),
           "{\"a\nb\":{}}", std::string("{\"t\":1}"), std::string("{\"t\":{}}")})
    expect_refused(file_of(json, 1), {});
  // Deep nesting ends with an error, not with the stack.
  std::string deep =
      "{\"t\":{\"x\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}}";
  expect_refused(file_of(deep, 0), {"64 levels"});
  expect_refused(
      with(entry("t", "U8", "[" + std::string(64 * 2, '1').replace(0, 0, "") + "]", "[0,1]"), 1),
      {"'t'"});
}

TEST(SafetensorsHeader, NamesAreDecodedAndUnique) {
  SafetensorsReader file;
  const std::string bytes = with(entry("\\u00e9\\\"\\ud83d\\ude00/\\n", "U8", "[1]", "[0,1]") +
                                     "," + entry("", "U8", "[1]", "[1,2]"),
                                 2);
  ASSERT_TRUE(open_bytes(bytes, &file).ok());
  EXPECT_NE(file.find("\xC3\xA9\"\xF0\x9F\x98\x80/\n"), nullptr);
  EXPECT_NE(file.find(""), nullptr);
  const auto a = entry("a", "U8", "[1]", "[0,1]");
  expect_refused(with(a + "," + entry("a", "U8", "[1]", "[1,2]"), 2), {"'a'", "twice"});
  expect_refused(with(a + "," + entry("\\u0061", "U8", "[1]", "[1,2]"), 2), {"'a'", "twice"});
  expect_refused(with(R"("t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]})", 1),
                 {"'t'", "dtype", "twice"});
  for (const char* missing :
       {R"("t":{"shape":[1],"data_offsets":[0,1]})", R"("t":{"dtype":"U8","data_offsets":[0,1]})",
        R"("t":{"dtype":"U8","shape":[1]})"})
    expect_refused(with(missing, 1), {"'t'", "no "});
}

TEST(SafetensorsHeader, MustBeUtf8) {
  for (const char* bad :
       {"\xFF", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xC3", "\x80"})
    expect_refused(with(entry(std::string("a") + bad, "U8", "[1]", "[0,1]"), 1), {"UTF-8"});
  for (const char* good : {"\xC2\x80", "\xEF\xBF\xBF", "\xED\x9F\xBF", "\xF4\x8F\xBF\xBF", "\x7F"})
    EXPECT_TRUE(
        open_bytes(
            with(entry(std::string("long enough for words ") + good, "U8", "[1]", "[0,1]"), 1))
            .ok());
}

TEST(SafetensorsHeader, LimitsOfDimensions) {
  std::string shape = "[1";
  for (int i = 1; i < 64; ++i) shape += ",1";
  EXPECT_TRUE(open_bytes(with(entry("t", "U8", shape + "]", "[0,1]"), 1)).ok());
  expect_refused(with(entry("t", "U8", shape + ",1]", "[0,1]"), 1), {"'t'", "64 dimensions"});
  expect_refused(with(entry("t", "U8", "[9223372036854775808,0]", "[0,0]"), 0), {"'t'", "2^63"});
  EXPECT_TRUE(open_bytes(with(entry("t", "U8", "[9223372036854775807,0]", "[0,0]"), 0)).ok());
}

TEST(SafetensorsHeader, FormattedHeadersAreReadBack) {
  const std::vector<int64_t> shape = {2, 3};
  const std::string name = "a\"\\\b\f\n\r\t\x01\x1f\xC3\xA9\xE2\x80\xA8/";
  const HeaderTensor tensors[] = {{name, FileDType::kF16, shape, 0, 12}};
  const SaveMetadata metadata = {{"k\n", "v\x02"}};
  const std::string text = format_header(tensors, &metadata);
  EXPECT_EQ(text.size() % 8, 0U);
  EXPECT_NE(text.find("\\\"\\\\\\b\\f\\n\\r\\t\\u0001\\u001f\xC3\xA9\xE2\x80\xA8/"),
            std::string::npos)
      << text;
  SafetensorsReader file;
  const std::string bytes = text + std::string(12, 'x');
  ASSERT_TRUE(open_bytes(bytes, &file).ok());
  ASSERT_NE(file.find(name), nullptr);
  EXPECT_EQ(file.metadata()[0].key, "k\n");
  EXPECT_EQ(file.metadata()[0].value, "v\x02");
  EXPECT_EQ(format_header({}, nullptr).substr(8), "{}      ");
}

TEST(SafetensorsHeader, EveryDtypeHasItsNameBack) {
  for (int i = 0; i < kNumFileDTypes; ++i) {
    FileDType back;
    ASSERT_TRUE(parse_file_dtype(file_dtype_name(static_cast<FileDType>(i)), &back));
    EXPECT_EQ(static_cast<int>(back), i);
    EXPECT_GT(file_dtype_bits(back), 0);
  }
  EXPECT_EQ(file_dtype_bits(static_cast<FileDType>(99)), 0);
}

}  // namespace
}  // namespace loraaccel::test
