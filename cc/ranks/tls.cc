#include "cc/ranks/tls.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <vector>

#include "cc/ranks/shared_library.h"

namespace dynemb {
namespace {

// Of OpenSSL's binary interface, which is the same in 1.1.1 and 3.
constexpr int kPem = 1, kVerifyPeer = 1, kFailWithoutCertificate = 2;
constexpr int kErrorWantRead = 2, kErrorWantWrite = 3, kErrorSyscall = 5, kErrorZeroReturn = 6;
constexpr int kCtrlMode = 33, kCtrlMinVersion = 123;
constexpr long kVersion13 = 0x0304;                           // NOLINT: its type there
constexpr long kPartialWrites = 1, kOtherAddressOnRetry = 2;  // NOLINT
constexpr const char* kNames[] = {"libssl.so.3", "libssl.so.1.1", "libssl.so"};

// Whether the process exits, and what waits until no session is used.
std::shared_mutex* ExitMutex() {
  static auto* const mutex = new std::shared_mutex;
  return mutex;
}
bool exits = false;  // guarded by ExitMutex()

}  // namespace

struct Tls::OpenSsl {
  void* (*method)();
  void* (*new_context)(void* method);
  void (*free_context)(void* context);
  long (*control)(void* context, int what, long value, void*);  // NOLINT: its type there
  int (*set_tickets)(void* context, size_t);
  void (*set_verify)(void* context, int mode, void* callback);
  void (*set_password)(void* context, int (*callback)(char*, int, int, void*));
  int (*load_authority)(void* context, const char* file, const char* folder);
  int (*use_certificate)(void* context, const char* file);
  int (*use_key)(void* context, const char* file, int type);
  int (*check_key)(const void* context);
  void* (*new_session)(void* context);
  void (*free_session)(void* session);
  int (*set_socket)(void* session, int socket);
  void (*set_client)(void* session);
  void (*set_server)(void* session);
  int (*handshake)(void* session);
  int (*read)(void* session, void* data, int bytes);
  int (*write)(void* session, const void* data, int bytes);
  int (*error)(const void* session, int returned);
  long (*verified)(const void* session);                             // NOLINT
  const char* (*verify_text)(long code);                             // NOLINT
  unsigned long (*next_error)();                                     // NOLINT
  void (*error_text)(unsigned long code, char* text, size_t bytes);  // NOLINT
  void (*clear_errors)();

  // Loads the first library that has all functions; once for each `library`.
  static Status Find(const std::string& library, const OpenSsl** found);

  // Takes the errors of this thread, and returns the first one; "" if there is none.
  std::string Error() const {
    char text[256] = "";
    if (const auto code = next_error()) error_text(code, text, sizeof(text));
    clear_errors();
    return text;
  }

 private:
  Status Load(const char* name);
};

Status Tls::OpenSsl::Load(const char* name) {
  SharedLibrary loaded(name, RTLD_NOW | RTLD_LOCAL);
  loaded.Find(&method, "TLS_method");
  loaded.Find(&new_context, "SSL_CTX_new");
  loaded.Find(&free_context, "SSL_CTX_free");
  loaded.Find(&control, "SSL_CTX_ctrl");
  loaded.Find(&set_tickets, "SSL_CTX_set_num_tickets");
  loaded.Find(&set_verify, "SSL_CTX_set_verify");
  loaded.Find(&set_password, "SSL_CTX_set_default_passwd_cb");
  loaded.Find(&load_authority, "SSL_CTX_load_verify_locations");
  loaded.Find(&use_certificate, "SSL_CTX_use_certificate_chain_file");
  loaded.Find(&use_key, "SSL_CTX_use_PrivateKey_file");
  loaded.Find(&check_key, "SSL_CTX_check_private_key");
  loaded.Find(&new_session, "SSL_new");
  loaded.Find(&free_session, "SSL_free");
  loaded.Find(&set_socket, "SSL_set_fd");
  loaded.Find(&set_client, "SSL_set_connect_state");
  loaded.Find(&set_server, "SSL_set_accept_state");
  loaded.Find(&handshake, "SSL_do_handshake");
  loaded.Find(&read, "SSL_read");
  loaded.Find(&write, "SSL_write");
  loaded.Find(&error, "SSL_get_error");
  loaded.Find(&verified, "SSL_get_verify_result");
  loaded.Find(&verify_text, "X509_verify_cert_error_string");
  loaded.Find(&next_error, "ERR_get_error");
  loaded.Find(&error_text, "ERR_error_string_n");
  loaded.Find(&clear_errors, "ERR_clear_error");
  return loaded.status();
}

Status Tls::OpenSsl::Find(const std::string& library, const OpenSsl** found) {
  static std::mutex mutex;
  static auto* const loaded = new std::map<std::string, OpenSsl>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto known = loaded->find(library);
  if (known != loaded->end()) {
    *found = &known->second;
    return Status();
  }
  std::vector<const char*> names(std::begin(kNames), std::end(kNames));
  if (!library.empty()) names.insert(names.begin(), library.c_str());
  OpenSsl functions;
  std::string reasons;
  for (const char* name : names) {
    const Status status = functions.Load(name);
    if (status.ok()) {
      functions.free_context(functions.new_context(functions.method()));
      // After OpenSSL's, which the line above has registered if nothing has before: called sooner.
      std::atexit([] {
        std::unique_lock<std::shared_mutex> last(*ExitMutex());
        exits = true;
      });
      *found = &loaded->emplace(library, functions).first->second;
      return Status();
    }
    reasons += (reasons.empty() ? "" : "; ") + status.message();
  }
  return FailedPrecondition(
      "TLS between ranks needs the shared libraries of OpenSSL 1.1.1 or 3, and none was found (" +
      reasons + ")");
}

Status Tls::Load(const std::string& library, const Files& files, std::shared_ptr<const Tls>* tls) {
  const OpenSsl* ssl = nullptr;
  DYNEMB_RETURN_IF_ERROR(OpenSsl::Find(library, &ssl));
  ssl->clear_errors();
  const std::shared_ptr<Tls> made(new Tls(ssl));
  void* const context = made->context_ = ssl->new_context(ssl->method());
  if (context == nullptr) return Internal("OpenSSL: " + ssl->Error());
  ssl->control(context, kCtrlMode, kPartialWrites | kOtherAddressOnRetry, nullptr);
  ssl->set_password(context, [](char*, int, int, void*) { return -1; });
  // No session is continued in another connection.
  if (ssl->control(context, kCtrlMinVersion, kVersion13, nullptr) != 1 ||
      ssl->set_tickets(context, 0) != 1) {
    return FailedPrecondition("OpenSSL has no TLS 1.3: " + ssl->Error());
  }
  ssl->set_verify(context, kVerifyPeer | kFailWithoutCertificate, nullptr);
  const auto wrong = [&](const char* what, const std::string& file) {
    return InvalidArgument(std::string(what) + " in '" + file +
                           "' cannot be used: " + ssl->Error());
  };
  if (ssl->load_authority(context, files.authority.c_str(), nullptr) != 1) {
    return wrong("the certificates of the authority", files.authority);
  }
  if (ssl->use_certificate(context, files.certificate.c_str()) != 1) {
    return wrong("the certificate", files.certificate);
  }
  if (ssl->use_key(context, files.key.c_str(), kPem) != 1 || ssl->check_key(context) != 1) {
    return wrong("the key", files.key);
  }
  *tls = made;
  return Status();
}

Tls::~Tls() {
  std::shared_lock<std::shared_mutex> lock(*ExitMutex());
  if (!exits && context_ != nullptr) library_->free_context(context_);
}

std::unique_ptr<Tls::Session> Tls::Start(int socket, bool is_client) const {
  std::unique_ptr<Session> session(new Session(library_));
  std::shared_lock<std::shared_mutex> lock(*ExitMutex());
  if (exits) return session;
  library_->clear_errors();
  session->session_ = library_->new_session(context_);
  if (session->session_ == nullptr || library_->set_socket(session->session_, socket) != 1) {
    throw std::bad_alloc();
  }
  (is_client ? library_->set_client : library_->set_server)(session->session_);
  return session;
}

Tls::Session::~Session() {
  std::shared_lock<std::shared_mutex> lock(*ExitMutex());
  if (!exits) library_->free_session(session_);
}

Tls::Session::Result Tls::Session::Handshake() {
  std::shared_lock<std::shared_mutex> lock(*ExitMutex());
  if (exits) return Result::kAwaitsRead;
  library_->clear_errors();  // of other sessions; After would take them as those of this one
  return After(library_->handshake(session_));
}

Tls::Session::Result Tls::Session::Read(void* data, size_t bytes, size_t* done) {
  std::shared_lock<std::shared_mutex> lock(*ExitMutex());
  if (exits) return Result::kAwaitsRead;
  library_->clear_errors();
  const int most = static_cast<int>(std::min(bytes, static_cast<size_t>(INT_MAX)));
  const int returned = library_->read(session_, data, most);
  *done = static_cast<size_t>(std::max(returned, 0));
  return After(returned);
}

Tls::Session::Result Tls::Session::Write(const void* data, size_t bytes, size_t* done) {
  std::shared_lock<std::shared_mutex> lock(*ExitMutex());
  if (exits) return Result::kAwaitsWrite;
  library_->clear_errors();
  const int most = static_cast<int>(std::min(bytes, static_cast<size_t>(INT_MAX)));
  const int returned = library_->write(session_, data, most);
  *done = static_cast<size_t>(std::max(returned, 0));
  const Result result = After(returned);
  return is_lost_ ? Result::kAwaitsWrite : result;
}

Tls::Session::Result Tls::Session::After(int returned) {
  if (returned > 0) return Result::kDone;
  const int system = errno;
  switch (library_->error(session_, returned)) {
    case kErrorWantRead:
      return Result::kAwaitsRead;
    case kErrorWantWrite:
      return Result::kAwaitsWrite;
    case kErrorZeroReturn:
      failure_ = "the other end has ended the connection";
      break;
    case kErrorSyscall:
      is_lost_ = true;
      failure_ = system == 0 ? "the other end has ended the connection" : strerror(system);
      break;
    default:
      if (const auto verified = library_->verified(session_)) {
        failure_ =
            std::string("the certificate is not accepted: ") + library_->verify_text(verified);
      } else {
        failure_ = library_->Error();
      }
  }
  library_->clear_errors();
  return Result::kFailed;
}

}  // namespace dynemb
