#include "cc/serving/served_model.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>

#include "cc/io/json.h"
#include "cc/io/json_file.h"
#include "cc/serving/model_files.h"

namespace dynemb {
namespace {

// The most attempts, if files were removed because a newer base superseded them.
constexpr int kAttempts = 5;

struct Descriptor {
  std::string tables;
  std::string follow;
  double follow_seconds = 1.0;
  uint64_t verify_bytes = uint64_t{1} << 30;  // a few tenths of a second
};

// The path without links and "..", so that one place has one name.
std::string Resolved(const std::string& path) {
  char* const found = realpath(path.c_str(), nullptr);
  if (found == nullptr) return path;
  std::string resolved = found;
  free(found);
  return resolved;
}

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
  const std::optional<Json> verify = json.Find("verify_bytes");
  if (verify.has_value() && !verify->Get(&descriptor->verify_bytes)) {
    return DataLoss(file + " is damaged: its member verify_bytes is wrong");
  }
  return Status();
}

uint64_t BytesToRead(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const TableEntry& table : manifest.tables) {
    for (const ShardEntry& shard : table.shards) {
      for (const auto& [name, column] : shard.columns) bytes += column.bytes;
    }
  }
  return bytes;
}

// The name of a file that no other file has, not even a later one with the same path.
std::string IdentityOf(const std::string& file) {
  struct stat found {};
  if (stat(file.c_str(), &found) != 0) return file;
  return Resolved(file) + "\n" + std::to_string(found.st_ino) + "\n" +
         std::to_string(found.st_mtim.tv_sec) + "." + std::to_string(found.st_mtim.tv_nsec);
}

// A model that was opened: with the snapshots up to `last`, for these tables.
struct Opened {
  std::weak_ptr<ServedModel> model;
  std::string last;
  std::set<std::string> tables;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::vector<Opened>> models;  // by descriptor and base
};

Registry& Models() {
  static Registry* const registry = new Registry;  // never destroyed: models may live until exit
  return *registry;
}

}  // namespace

Status ServedModel::Open(Exec& exec, const std::string& descriptor, const std::string& table,
                         std::shared_ptr<ServedModel>* model) {
  DYNEMB_RETURN_IF_ERROR(VerifyModelFiles(descriptor));
  Descriptor described;
  DYNEMB_RETURN_IF_ERROR(ReadDescriptor(descriptor, &described));
  std::vector<std::string> directories;
  Status listed = ListChain(described.tables, &directories);
  if (!listed.ok()) {
    return Status(listed.code(), listed.message() + "; " + descriptor + " names it");
  }
  const std::string place = IdentityOf(descriptor) + "\n" + IdOfDirectory(directories.front());
  const std::string last = IdOfDirectory(directories.back());
  Registry& registry = Models();
  std::lock_guard<std::mutex> lock(registry.mutex);
  for (auto it = registry.models.begin(); it != registry.models.end();) {
    std::vector<Opened>& all = it->second;
    const auto ended = [](const Opened& opened) { return opened.model.expired(); };
    all.erase(std::remove_if(all.begin(), all.end(), ended), all.end());
    it = all.empty() ? registry.models.erase(it) : std::next(it);
  }
  std::vector<Opened>& all = registry.models[place];
  // One that lacks the table is of the same loading; the chain may have grown since it began.
  auto found = std::find_if(all.begin(), all.end(), [&table](const Opened& opened) {
    return opened.tables.count(table) == 0;
  });
  if (found == all.end()) {
    found = std::find_if(all.begin(), all.end(),
                         [&last](const Opened& opened) { return opened.last == last; });
  }
  if (found != all.end() && (*model = found->model.lock()) != nullptr) {
    found->tables.insert(table);
    return Status();
  }
  std::shared_ptr<ServedModel> opened(new ServedModel(described.verify_bytes));
  uint64_t count = 0;
  DYNEMB_RETURN_IF_ERROR(opened->Apply(exec, Resolved(described.tables), &count));
  if (!described.follow.empty()) {
    opened->follower_ =
        std::thread(&ServedModel::Follow, opened.get(), described.follow, described.follow_seconds);
  }
  all.push_back({opened, last, {table}});
  *model = std::move(opened);
  return Status();
}

ServedModel::~ServedModel() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (follower_.joinable()) follower_.join();
}

std::shared_ptr<const ServedState> ServedModel::state() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return now_.state;
}

std::shared_ptr<const ServedState> ServedModel::StateOf(uint64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (step == 0) return now_.state;
  for (const Used& used : before_) {
    if (used.steps.Has(step)) return used.state;
  }
  now_.steps.Add(step);
  return now_.state;
}

Status ServedModel::follow_error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return follow_error_;
}

Status ServedModel::Attach(const ServedOptions& options, size_t* number) {
  std::shared_ptr<ServedTable> table;
  DYNEMB_RETURN_IF_ERROR(ServedTable::Create(options, &table));
  std::lock_guard<std::mutex> applying(applying_);
  size_t free_number = 0;
  while (free_number < attached_.size() && attached_[free_number] != nullptr) ++free_number;
  if (free_number == attached_.size()) attached_.emplace_back();
  attached_[free_number] = std::move(table);
  Status status = Publish(*state());
  if (!status.ok()) {
    attached_[free_number] = nullptr;
    return status;
  }
  *number = free_number;
  return Status();
}

void ServedModel::Detach(size_t number) {
  std::lock_guard<std::mutex> applying(applying_);
  attached_[number] = nullptr;
}

Status ServedModel::Publish(const ServedState& next) {
  auto published = std::make_shared<ServedState>(next);
  published->tables.clear();
  for (const auto& table : attached_) {
    published->tables.emplace_back();
    if (table == nullptr) continue;
    const std::string& name = table->options().name;
    const auto rows = next.rows.find(name);
    if (rows == next.rows.end()) {
      return DataLoss(next.last.directory + " has no table '" + name + "'");
    }
    Status status = table->WithRows(rows->second, &published->tables.back());
    if (!status.ok()) return Status(status.code(), next.last.directory + ": " + status.message());
  }
  const auto time = std::chrono::steady_clock::now();
  std::vector<Used> forgotten;  // freed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  now_.replaced = time;
  if (now_.state != nullptr) before_.push_front(std::move(now_));
  now_ = Used();
  now_.state = std::move(published);
  while (!before_.empty() &&
         (before_.size() > kStates || time - before_.back().replaced > kMemory)) {
    forgotten.push_back(std::move(before_.back()));
    before_.pop_back();
  }
  return Status();
}

Status ServedModel::AfterDelta(Exec& exec, const ServedState& now, const Manifest& delta,
                               ServedState* next) const {
  if (!delta.parent.empty() && now.applied.count(delta.parent) == 0) {
    return DataLoss("a gap before " + delta.directory + ": it continues snapshot " + delta.parent +
                    ", which was not applied; the last snapshot applied is " + now.last.id);
  }
  if (delta.since > now.last.watermark) {
    return DataLoss("a gap before " + delta.directory + ": it has the changes since " +
                    std::to_string(delta.since) + ", but only changes up to " +
                    std::to_string(now.last.watermark) + " were applied");
  }
  next->rows = now.rows;
  for (const TableEntry& entry : delta.tables) {
    const auto rows = next->rows.find(entry.name);
    if (rows == next->rows.end()) {
      return DataLoss(delta.directory + " has table '" + entry.name + "', but its base does not");
    }
    const TableEntry& known = rows->second->entry();
    if (entry.dim != known.dim || entry.key_type != known.key_type || entry.dtype != known.dtype) {
      return DataLoss(delta.directory + ": table '" + entry.name +
                      "' has other types than in its base");
    }
    std::shared_ptr<const TableRows> changed;
    DYNEMB_RETURN_IF_ERROR(rows->second->WithDelta(exec, delta, entry, &changed));
    rows->second = std::move(changed);
  }
  return Status();
}

Status ServedModel::After(Exec& exec, const std::shared_ptr<const ServedState>& now,
                          const std::string& directory,
                          std::shared_ptr<const ServedState>* next) const {
  *next = now;
  const std::string id = IdOfDirectory(directory);
  if (now != nullptr && !id.empty() && now->applied.count(id) != 0) return Status();
  Manifest manifest;
  DYNEMB_RETURN_IF_ERROR(ReadManifest(directory, &manifest));
  if (now != nullptr && now->applied.count(manifest.id) != 0) return Status();
  auto made = std::make_shared<ServedState>();
  if (manifest.is_base) {
    const bool verify = BytesToRead(manifest) <= verify_bytes_;
    for (const TableEntry& entry : manifest.tables) {
      DYNEMB_RETURN_IF_ERROR(
          TableRows::OfBase(exec, manifest, entry, verify, &made->rows[entry.name]));
    }
    made->applied.insert(manifest.continues.begin(), manifest.continues.end());
  } else if (now == nullptr) {
    return DataLoss(directory + " is a delta, and there is no base");
  } else if (manifest.watermark <= now->last.watermark) {
    *made = *now;  // which has the changes of this delta already
    made->applied.insert(manifest.id);
    *next = std::move(made);
    return Status();
  } else {
    made->applied = now->applied;
    DYNEMB_RETURN_IF_ERROR(AfterDelta(exec, *now, manifest, made.get()));
  }
  made->applied.insert(manifest.id);
  manifest.tables.clear();
  made->last = std::move(manifest);
  *next = std::move(made);
  return Status();
}

Status ServedModel::ApplyChain(Exec& exec, const std::vector<std::string>& directories,
                               uint64_t* count) {
  if (passed_.count(directories.back()) != 0) return Status();
  std::shared_ptr<const ServedState> now = state(), published = now;
  uint64_t waiting = 0;  // snapshots of `now` that are not visible yet
  for (const std::string& directory : directories) {
    std::shared_ptr<const ServedState> next;
    DYNEMB_RETURN_IF_ERROR(After(exec, now, directory, &next));
    if (next == now) continue;
    waiting += now == nullptr || next->last.id != now->last.id ? 1 : 0;
    now = std::move(next);
    // Ticks are numbers of one process, so bases are compared by time.
    if (published != nullptr && now->last.watermark_utc_ns < published->last.watermark_utc_ns) {
      continue;
    }
    DYNEMB_RETURN_IF_ERROR(Publish(*now));
    published = now;
    *count += std::exchange(waiting, 0);
  }
  if (waiting > 0) passed_.insert(directories.back());
  return Status();
}

Status ServedModel::Apply(Exec& exec, const std::string& path, uint64_t* count) {
  *count = 0;
  std::lock_guard<std::mutex> applying(applying_);
  for (int attempt = 1;; ++attempt) {
    std::vector<std::string> directories, found;
    DYNEMB_RETURN_IF_ERROR(ListChain(path, &directories));
    Status status = ApplyChain(exec, directories, count);
    if (status.ok() || attempt == kAttempts) return status;
    // Files of snapshots that a newer base superseded may have been removed meanwhile.
    if (!ListChain(path, &found).ok() || found.front() == directories.front()) return status;
  }
}

void ServedModel::Follow(std::string path, double seconds) {
  using Clock = std::chrono::system_clock;  // for others, older C libraries have no wait
  const auto pause = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(seconds, 1e6)));
  SerialExec exec;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_.wait_until(lock, Clock::now() + pause, [this] { return stopping_; })) {
    lock.unlock();
    Status status;
    uint64_t count = 0;
    try {
      status = Apply(exec, path, &count);
    } catch (const std::exception& error) {
      status = ResourceExhausted(path + ": " + error.what());
    }
    lock.lock();
    follow_error_ = std::move(status);
  }
}

}  // namespace dynemb
