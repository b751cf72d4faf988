#include "cc/serving/served_model.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "cc/io/mapped_file.h"
#include "cc/serving/model_files.h"

namespace dynemb {
namespace {

// The most attempts, if files were removed because a newer base superseded them.
constexpr int kAttempts = 5;

uint64_t BytesToRead(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const TableEntry& table : manifest.tables) {
    for (const ShardEntry& shard : table.shards) {
      for (const auto& [name, column] : shard.columns) bytes += column.bytes;
    }
  }
  return bytes;
}

// Sets *name to a name of a file that no other file has, not even a later one with the same path.
Status NameFile(const std::string& file, std::string* name) {
  FileIdentity found;
  DYNEMB_RETURN_IF_ERROR(IdentifyFile(file, &found));
  *name = Resolved(file) + "\n" + std::to_string(found.inode) + "\n" +
          std::to_string(found.modified_seconds) + "." + std::to_string(found.modified_nanoseconds);
  return Status();
}

// The ids of snapshots, and which files their manifests are: `tf-dynemb forget` replaces these. A
// missing manifest is an error where it is read.
std::string NameSnapshots(const std::string* first, const std::string* end) {
  std::string names;
  for (const std::string* directory = first; directory != end; ++directory) {
    std::string manifest;
    (void)NameFile(*directory + "/MANIFEST.json", &manifest);
    names += IdOfDirectory(*directory) + "\n" + manifest + "\n";
  }
  return names;
}

// A model that was opened: by a process, with these snapshots, for these tables.
struct Opened {
  std::weak_ptr<ServedModel> model;
  pid_t pid;
  std::string snapshots;
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
  Status listed = ListChain(described.tables, "", &directories);
  if (!listed.ok()) {
    return Status(listed.code(), listed.message() + "; " + descriptor + " names it");
  }
  std::string place;
  DYNEMB_RETURN_IF_ERROR(NameFile(descriptor, &place));
  const std::string* const first = directories.data();
  place += "\n" + NameSnapshots(first, first + 1);
  const std::string snapshots = NameSnapshots(first, first + directories.size());
  Registry& registry = Models();
  std::lock_guard<std::mutex> lock(registry.mutex);
  for (auto it = registry.models.begin(); it != registry.models.end();) {
    std::vector<Opened>& all = it->second;
    const auto ended = [](const Opened& opened) {
      return opened.pid != getpid() || opened.model.expired();
    };
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
                         [&](const Opened& opened) { return opened.snapshots == snapshots; });
  }
  if (found != all.end() && (*model = found->model.lock()) != nullptr) {
    found->tables.insert(table);
    return Status();
  }
  std::shared_ptr<ServedModel> opened(new ServedModel(described), [](ServedModel* ended) {
    if (ended->pid_ == getpid()) delete ended;
  });
  uint64_t count = 0;
  DYNEMB_RETURN_IF_ERROR(opened->Apply(exec, Resolved(described.tables), &count));
  if (described.dense && opened->state()->dense == nullptr) {
    return FailedPrecondition(described.tables +
                              " has no dense weights, which the model reads: publish them with the "
                              "tables, or export the model with dense=None");
  }
  if (!described.follow.empty()) opened->StartThread();
  all.push_back({opened, getpid(), snapshots, {table}});
  *model = std::move(opened);
  return Status();
}

ServedModel::ServedModel(Descriptor options) : options_(std::move(options)), pid_(getpid()) {}

ServedModel::~ServedModel() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
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
  SerialExec exec;
  Status status = Publish(exec, *state());
  if (!status.ok()) {
    attached_[free_number] = nullptr;
    return status;
  }
  *number = free_number;
  return Status();
}

void ServedModel::Detach(size_t number) {
  if (getpid() != pid_) return;
  std::lock_guard<std::mutex> applying(applying_);
  attached_[number] = nullptr;
  auto without = std::make_shared<ServedState>(*state());
  without->tables[number] = nullptr;
  std::shared_ptr<const ServedState> before = std::move(without);  // freed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  now_.state.swap(before);
}

Status ServedModel::Publish(Exec& exec, const ServedState& next) {
  const std::shared_ptr<const ServedState> now = state();
  auto published = std::make_shared<ServedState>(next);
  // First: the rows of a state that is refused need not be brought to a place.
  DYNEMB_RETURN_IF_ERROR(ReadDense(exec, next, now.get(), &published->dense));
  published->tables.clear();
  for (const auto& table : attached_) {
    const size_t number = published->tables.size();
    published->tables.emplace_back();
    if (table == nullptr) continue;
    const std::string& name = table->options().name;
    const auto rows = next.rows.find(name);
    if (rows == next.rows.end()) {
      return DataLoss(next.last.directory + " has no table '" + name + "'");
    }
    const bool has_before = now != nullptr && number < now->tables.size();
    const ServedTable* const before = has_before ? now->tables[number].get() : nullptr;
    Status status = table->WithRows(rows->second, before, &published->tables.back());
    if (!status.ok()) return Status(status.code(), next.last.directory + ": " + status.message());
  }
  const bool is_same = now != nullptr && now->last.id == next.last.id;
  if (now != nullptr && !is_same) StartThread();  // which forgets its rows
  const auto time = std::chrono::steady_clock::now();
  std::vector<Used> forgotten;  // freed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_same) {
    now_.state = std::move(published);
    return Status();
  }
  now_.replaced = time;
  if (now_.state != nullptr) before_.push_front(std::move(now_));
  now_ = Used();
  now_.state = std::move(published);
  Forget(time, &forgotten);
  ++publications_;
  changed_.notify_all();
  return Status();
}

Status ServedModel::ReadDense(Exec& exec, const ServedState& next, const ServedState* now,
                              std::shared_ptr<const DenseWeights>* dense) const {
  *dense = now == nullptr ? nullptr : now->dense;
  if (!options_.dense || next.dense_source == nullptr) return Status();
  if (now != nullptr && next.dense_source == now->dense_source) return Status();
  const std::shared_ptr<const DenseWeights> before = *dense;
  DYNEMB_RETURN_IF_ERROR(DenseWeights::Read(exec, *next.dense_source, dense));
  const std::string difference =
      before == nullptr ? std::string() : (*dense)->DifferenceFrom(*before);
  if (difference.empty()) return Status();
  return FailedPrecondition(next.dense_source->directory +
                            " has other dense weights than the model that is served: " +
                            difference + ". Export the model again");
}

void ServedModel::Forget(std::chrono::steady_clock::time_point time, std::vector<Used>* forgotten) {
  while (!before_.empty() &&
         (before_.size() > kStates || time - before_.back().replaced >= kMemory)) {
    forgotten->push_back(std::move(before_.back()));
    before_.pop_back();
  }
}

bool ServedModel::IsEarlier(const Manifest& base, const ServedState& now) const {
  const std::vector<std::string>& same = base.continues;
  return lineage_.applied.count(base.id) != 0 ||
         (std::find(same.begin(), same.end(), now.last.id) == same.end() &&
          std::any_of(same.begin(), same.end(),
                      [this](const std::string& id) { return lineage_.applied.count(id) != 0; }));
}

Status ServedModel::CheckRelated(const Manifest& base, const ServedState& now) const {
  if (options_.unrelated) return Status();
  for (const auto* ids : {&base.continues, &base.after}) {
    for (const std::string& id : *ids) {
      if (lineage_.Has(id)) return Status();
    }
  }
  for (const TableEntry& entry : base.tables) {
    const auto rows = now.rows.find(entry.name);
    if (rows == now.rows.end()) continue;
    const std::string& history = rows->second->entry().history;
    if (!history.empty() && !entry.history.empty() && history != entry.history) {
      return FailedPrecondition(base.directory + " is of another table '" + entry.name +
                                "' than the model that is served, and does not replace it: export "
                                "the new model, or export with unrelated=True");
    }
  }
  return Status();
}

Status ServedModel::OfBase(Exec& exec, const std::shared_ptr<const ServedState>& now, Manifest base,
                           std::shared_ptr<const ServedState>* next) const {
  auto made = std::make_shared<ServedState>();
  const bool verify = BytesToRead(base) <= options_.verify_bytes;
  for (const TableEntry& entry : base.tables) {
    DYNEMB_RETURN_IF_ERROR(TableRows::OfBase(exec, base, entry, verify, &made->rows[entry.name]));
  }
  base.tables.clear();
  if (base.dense.has_value()) {
    made->dense_source = std::make_shared<Manifest>(base);
  } else if (now != nullptr) {
    made->dense_source = now->dense_source;
  }
  made->last = std::move(base);
  *next = std::move(made);
  return Status();
}

Status ServedModel::AfterDelta(Exec& exec, const std::shared_ptr<const ServedState>& now,
                               Manifest delta, const Lineage& lineage,
                               std::shared_ptr<const ServedState>* next) const {
  *next = now;
  if (now == nullptr) return DataLoss(delta.directory + " is a delta, and there is no base");
  if (!delta.parent.empty() && !lineage.Has(delta.parent)) {
    return DataLoss("a gap before " + delta.directory + ": it continues snapshot " + delta.parent +
                    ", which was not applied; the last snapshot applied is " + now->last.id);
  }
  if (delta.parent == now->last.id && delta.watermark < now->last.watermark) {
    return DataLoss(delta.directory + " has the watermark " + std::to_string(delta.watermark) +
                    ", which is less than the watermark of the snapshot it continues, " +
                    std::to_string(now->last.watermark));
  }
  if (delta.watermark <= now->last.watermark) return Status();
  if (delta.since > now->last.watermark) {
    return DataLoss("a gap before " + delta.directory + ": it has the changes since " +
                    std::to_string(delta.since) + ", but only changes up to " +
                    std::to_string(now->last.watermark) + " were applied");
  }
  auto made = std::make_shared<ServedState>();
  made->rows = now->rows;
  made->dense_source = now->dense_source;
  for (const TableEntry& entry : delta.tables) {
    const auto rows = made->rows.find(entry.name);
    if (rows == made->rows.end()) {
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
  delta.tables.clear();
  if (delta.dense.has_value()) made->dense_source = std::make_shared<Manifest>(delta);
  made->last = std::move(delta);
  *next = std::move(made);
  return Status();
}

Status ServedModel::ApplyChain(Exec& exec, const std::vector<std::string>& directories,
                               uint64_t* count) {
  std::shared_ptr<const ServedState> now = state();
  size_t done = 0;   // the number of snapshots that `now` has
  size_t older = 0;  // the number of those that are older than the state
  for (size_t i = directories.size(); now != nullptr && done == 0 && i > 0; --i) {
    const std::string id = IdOfDirectory(directories[i - 1]);
    if (lineage_.applied.count(id) != 0) done = i;
    if (older == 0 && lineage_.after.count(id) != 0) older = i;
  }
  if (std::max(done, older) == directories.size()) return Status();
  Lineage of_base;
  Lineage* lineage = &lineage_;
  if (done == 0) {
    Manifest first;
    DYNEMB_RETURN_IF_ERROR(ReadManifest(directories[0], &first));
    // The directory may have another name.
    if (directories.size() == 1 && lineage_.Has(first.id)) return Status();
    if (first.is_base && now != nullptr && IsEarlier(first, *now)) {
      lineage_.applied.insert(first.id);
      done = 1;
    } else if (first.is_base) {
      if (now != nullptr) DYNEMB_RETURN_IF_ERROR(CheckRelated(first, *now));
      of_base.applied.insert(first.continues.begin(), first.continues.end());
      of_base.applied.insert(first.id);
      of_base.after.insert(first.after.begin(), first.after.end());
      lineage = &of_base;
      DYNEMB_RETURN_IF_ERROR(OfBase(exec, now, std::move(first), &now));
      done = 1;
    }
  }
  const bool replaces = lineage == &of_base;
  uint64_t waiting = replaces ? 1 : 0;  // snapshots of `now` that are not visible
  Status status;
  for (; done < directories.size(); ++done) {
    Manifest delta;
    std::shared_ptr<const ServedState> next;
    status = ReadManifest(directories[done], &delta);
    if (!status.ok()) break;
    const std::string id = delta.id;
    status = AfterDelta(exec, now, std::move(delta), *lineage, &next);
    if (status.ok() && next != now) {
      if (!replaces) status = Publish(exec, *next);
      if (status.ok()) ++(replaces ? waiting : *count);
    }
    if (!status.ok()) break;
    lineage->applied.insert(id);
    now = std::move(next);
  }
  if (replaces && done > older) {
    DYNEMB_RETURN_IF_ERROR(Publish(exec, *now));
    lineage_ = std::move(of_base);
    *count += waiting;
  }
  return status;
}

Status ServedModel::Apply(Exec& exec, const std::string& path, uint64_t* count) {
  *count = 0;
  std::lock_guard<std::mutex> applying(applying_);
  Status status = ApplyAt(exec, path, count);
  applied_ += *count;
  if (!status.ok() && status.message() != last_error_.message()) ++refused_;
  last_error_ = status;
  return status;
}

Status ServedModel::ApplyAt(Exec& exec, const std::string& path, uint64_t* count) {
  for (int attempt = 1;; ++attempt) {
    const std::shared_ptr<const ServedState> now = state();
    const std::string from = now == nullptr ? std::string() : now->last.directory;
    std::vector<std::string> directories, found;
    DYNEMB_RETURN_IF_ERROR(ListChain(path, from, &directories));
    Status status = ApplyChain(exec, directories, count);
    if (status.ok() || attempt == kAttempts) return status;
    // Files of snapshots that a newer base superseded may have been removed meanwhile.
    if (!ListChain(path, from, &found).ok() || found.front() == directories.front()) return status;
  }
}

void ServedModel::StartThread() {
  if (!thread_.joinable()) thread_ = std::thread(&ServedModel::RunThread, this);
}

void ServedModel::RunThread() {
  using Clock = std::chrono::steady_clock;
  constexpr double kMostSeconds = 1e6;
  const auto pause = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(options_.follow_seconds, kMostSeconds)));
  SerialExec exec;
  std::vector<Used> forgotten;
  auto poll = options_.follow.empty() ? Clock::time_point::max() : Clock::now() + pause;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const auto wake = before_.empty() ? poll : std::min(poll, before_.back().replaced + kMemory);
    changed_.wait_for(lock, wake - Clock::now(),
                      [this, seen = publications_] { return stopping_ || publications_ != seen; });
    Forget(Clock::now(), &forgotten);
    const bool polls = !stopping_ && Clock::now() >= poll;
    lock.unlock();
    forgotten.clear();
    Status status;
    if (polls) {
      uint64_t count = 0;
      try {
        status = Apply(exec, options_.follow, &count);
      } catch (const std::exception& error) {
        status = ResourceExhausted(options_.follow + ": " + error.what());
      }
      // If memory has run out, the states that are forgotten meanwhile free some.
      const bool waits = status.code() == Code::kResourceExhausted;
      poll = Clock::now() + (waits ? std::max<Clock::duration>(pause, kMemory) : pause);
    }
    lock.lock();
    if (polls) follow_error_ = std::move(status);
  }
}

}  // namespace dynemb
