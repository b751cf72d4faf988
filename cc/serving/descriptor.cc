#include "cc/serving/descriptor.h"

#include <stdlib.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cc/io/json.h"
#include "cc/io/json_file.h"

namespace dynemb {
namespace {

// `path`, if it is not absolute, from a folder that exists.
std::string PathFrom(const std::string& folder, std::string path) {
  if (path[0] == '/') return path;
  std::string from = Resolved(folder.empty() ? "." : folder);
  for (const std::string up = "../"; path.compare(0, up.size(), up) == 0;) {
    path.erase(0, up.size());
    from.erase(std::min(from.find_last_of('/'), from.size()));
  }
  return from + "/" + path;
}

}  // namespace

std::string Resolved(const std::string& path) {
  char* const found = realpath(path.c_str(), nullptr);
  if (found == nullptr) return path;
  std::string resolved = found;
  free(found);
  return resolved;
}

Status ReadDescriptor(const std::string& file, Descriptor* descriptor) {
  constexpr size_t kMostBytes = size_t{1} << 16;
  Json json;
  DYNEMB_RETURN_IF_ERROR(ReadJson(file, kMostBytes, &json));
  const auto text_of = [&json](const char* name) {
    const std::optional<Json> member = json.Find(name);
    return member.has_value() ? member->string() : std::string();
  };
  if (text_of("format") != "tf_dynemb.served_tables") {
    return DataLoss(file + " is not the description of the tables of an exported model");
  }
  uint64_t version = 0;
  const std::optional<Json> number = json.Find("version");
  if (!number.has_value() || !number->Get(&version)) {
    return DataLoss(file + " is damaged: it has no version");
  }
  if (version != 1) {
    return InvalidArgument(file + " is of version " + std::to_string(version) +
                           "; this tf_dynemb reads version 1");
  }
  const std::string folder = file.substr(0, file.find_last_of('/') + 1);
  const std::string tables = text_of("tables");
  if (tables.empty()) return DataLoss(file + " is damaged: it names no tables");
  descriptor->tables = PathFrom(folder, tables);
  const std::string follow = text_of("follow");
  if (!follow.empty()) descriptor->follow = PathFrom(folder, follow);
  if (const std::optional<Json> seconds = json.Find("follow_seconds")) {
    if (!seconds->Get(&descriptor->follow_seconds) || !(descriptor->follow_seconds > 0)) {
      return DataLoss(file + " is damaged: its member follow_seconds is wrong");
    }
  }
  for (const auto& [name, option] :
       {std::pair("unrelated", &descriptor->unrelated), std::pair("dense", &descriptor->dense)}) {
    const std::optional<Json> flag = json.Find(name);
    if (!flag.has_value()) continue;
    if (flag->kind() != Json::Kind::kBool) {
      return DataLoss(file + " is damaged: its member " + name + " is wrong");
    }
    *option = flag->Canonical() == "true";
  }
  const std::optional<Json> verify = json.Find("verify_bytes");
  if (verify.has_value() && !verify->Get(&descriptor->verify_bytes)) {
    return DataLoss(file + " is damaged: its member verify_bytes is wrong");
  }
  return Status();
}

}  // namespace dynemb
