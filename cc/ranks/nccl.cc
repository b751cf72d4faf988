#include "cc/ranks/nccl.h"

#include <climits>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "cc/ranks/shared_library.h"

namespace dynemb {
namespace {

// NCCL's types and numbers, as its interface has had them since 2.14.
struct Id {
  char bytes[128];
};
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;  // of this type
  int blocking = 0;
  int after = INT_MIN;  // undefined; fills the last word
};
constexpr int kSuccess = 0, kInProgress = 7;
constexpr int kBytes = 1;  // the data type uint8
constexpr int kLeastVersion = 21400;

}  // namespace

struct Nccl::Library {
  int (*get_version)(int*);
  int (*get_id)(Id*);
  int (*join)(void**, int, Id, int, Config*);
  int (*start_group)();
  int (*end_group)();
  int (*send)(const void*, size_t, int, int, void*, void*);
  int (*receive)(void*, size_t, int, int, void*, void*);
  int (*get_error)(void*, int*);
  int (*abort)(void*);
  const char* (*error_text)(int);
  const char* (*last_error)(void*);
};

Nccl::Nccl(std::unique_ptr<Library> library) : library_(std::move(library)) {}
Nccl::~Nccl() = default;

Status Nccl::Load(const std::string& library, std::unique_ptr<Nccl>* nccl) {
  SharedLibrary loaded(library, RTLD_NOW | RTLD_LOCAL);
  auto found = std::make_unique<Library>();
  loaded.Find(&found->get_version, "ncclGetVersion");
  loaded.Find(&found->get_id, "ncclGetUniqueId");
  loaded.Find(&found->join, "ncclCommInitRankConfig");
  loaded.Find(&found->start_group, "ncclGroupStart");
  loaded.Find(&found->end_group, "ncclGroupEnd");
  loaded.Find(&found->send, "ncclSend");
  loaded.Find(&found->receive, "ncclRecv");
  loaded.Find(&found->get_error, "ncclCommGetAsyncError");
  loaded.Find(&found->abort, "ncclCommAbort");
  loaded.Find(&found->error_text, "ncclGetErrorString");
  loaded.Find(&found->last_error, "ncclGetLastError");
  if (!loaded.status().ok()) {
    return FailedPrecondition("NCCL 2.14 or later is required: " + loaded.status().message());
  }
  std::unique_ptr<Nccl> made(new Nccl(std::move(found)));
  DYNEMB_RETURN_IF_ERROR(
      made->Check("ncclGetVersion", made->library_->get_version(&made->version_)));
  if (made->version_ < kLeastVersion) {
    return FailedPrecondition(library + " is version " + std::to_string(made->version_) +
                              ": NCCL 2.14 or later is required");
  }
  *nccl = std::move(made);
  return Status();
}

Status Nccl::Check(const char* call, int result) const {
  if (result == kSuccess || result == kInProgress) return Status();
  std::string text = std::string(call) + " failed: " + library_->error_text(result);
  const char* const last = library_->last_error(nullptr);
  if (last != nullptr && *last != '\0') text += "; " + std::string(last);
  return Internal(text);
}

Status Nccl::Look(const char* what, bool* goes_on) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) return Internal("NCCL has been aborted");
  int result = kSuccess;
  DYNEMB_RETURN_IF_ERROR(
      Check("ncclCommGetAsyncError", library_->get_error(communicator_, &result)));
  *goes_on = result == kInProgress;
  return Check(what, result);
}

Status Nccl::AwaitCall(Group* group, const char* call) {
  return group->Await(call, [&](bool* done) {
    bool goes_on = false;
    const Status status = Look(call, &goes_on);
    *done = !goes_on;
    return status;
  });
}

Status Nccl::Join(Group* group) {
  Id id{};
  if (group->rank() == 0) {
    DYNEMB_RETURN_IF_ERROR(Check("ncclGetUniqueId", library_->get_id(&id)));
  }
  DYNEMB_RETURN_IF_ERROR(group->Broadcast({"nccl", 0, ""}, 0, id.bytes, sizeof(id.bytes)));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) return Internal("NCCL has been aborted");
    Config config;
    const int result = library_->join(&communicator_, group->size(), id, group->rank(), &config);
    DYNEMB_RETURN_IF_ERROR(Check("ncclCommInitRankConfig", result));
  }
  return AwaitCall(group, "ncclCommInitRankConfig");
}

Status Nccl::Exchange(Group* group, const Slices& to, const Slices& from, void* stream) {
  bool is_joined;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_joined = communicator_ != nullptr;
  }
  if (!is_joined) DYNEMB_RETURN_IF_ERROR(Join(group));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) return Internal("NCCL has been aborted");
    DYNEMB_RETURN_IF_ERROR(Check("ncclGroupStart", library_->start_group()));
    Status failed;
    const auto keep_first = [&](const char* call, int result) {
      const Status status = Check(call, result);
      if (failed.ok()) failed = status;
    };
    for (int r = 0; r < group->size(); ++r) {
      if (to[r].bytes != 0) {
        keep_first("ncclSend",
                   library_->send(to[r].data, to[r].bytes, kBytes, r, communicator_, stream));
      }
      if (from[r].bytes != 0) {
        keep_first("ncclRecv", library_->receive(from[r].data, from[r].bytes, kBytes, r,
                                                 communicator_, stream));
      }
    }
    keep_first("ncclGroupEnd", library_->end_group());
    DYNEMB_RETURN_IF_ERROR(failed);
  }
  return AwaitCall(group, "ncclGroupEnd");
}

Status Nccl::Await(Group* group, const std::string& operation, Group::Poll has_ended) {
  return group->Await(operation, [&](bool* done) {
    DYNEMB_RETURN_IF_ERROR(has_ended(done));
    bool goes_on;
    return Look("an exchange by NCCL", &goes_on);
  });
}

void Nccl::Abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(aborted_, true) || communicator_ == nullptr) return;
  (void)library_->abort(std::exchange(communicator_, nullptr));
}

}  // namespace dynemb
