// Tls: encrypted connections between ranks, by an OpenSSL library that is found when the process
// runs.
//
// Nothing of OpenSSL is compiled in or linked: its functions are looked up by name. Version 1.1.1
// and all of 3 have them.
//
// Both ends of a connection show a certificate that one authority has signed, and speak TLS 1.3. A
// name in a certificate means nothing: whom the authority has certified is a rank. The end of a
// connection is a failure of the ranks in any case, so no end announces it (close_notify).
//
// When the process exits, OpenSSL frees its memory, and threads may go on: from then on sessions do
// nothing, and say that they wait.
#ifndef DYNEMB_RANKS_TLS_H_
#define DYNEMB_RANKS_TLS_H_

#include <cstddef>
#include <memory>
#include <string>

#include "cc/table/status.h"

namespace dynemb {

class Tls {
 public:
  // Paths of PEM files: the certificate of this rank and those between it and the authority, its
  // private key without a password, and the certificates of the authority.
  struct Files {
    std::string certificate, key, authority;
  };
  // Loads the library and the files. `library` is the name or path of a shared library that is
  // OpenSSL's, or depends on it, for dlopen; if it has not the functions, or is "", the system's
  // are tried. FailedPrecondition: there is none; InvalidArgument names the file that is wrong.
  static Status Load(const std::string& library, const Files& files,
                     std::shared_ptr<const Tls>* tls);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  class Session;
  // Starts a session over a connected socket that does not block. The object and the socket must
  // outlive it. Throws std::bad_alloc.
  std::unique_ptr<Session> Start(int socket, bool is_client) const;

 private:
  struct OpenSsl;
  explicit Tls(const OpenSsl* library) : library_(library) {}

  const OpenSsl* const library_;
  void* context_ = nullptr;
};

// One end of a connection. Not thread-safe. After kFailed it must not be used.
class Tls::Session {
 public:
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  enum class Result {
    kDone,         // the handshake is complete; or some bytes are done
    kAwaitsRead,   // call again when the socket can be read
    kAwaitsWrite,  // call again when it can be written, with the same bytes
    kFailed,       // failure() says why
  };
  Result Handshake();
  // Set `done` to the number of bytes, which is at least one, if the result is kDone. `bytes` must
  // not be 0. The bytes may lie elsewhere when Write is called again. Write does not fail when the
  // connection is lost: Read does, after it has returned all that has arrived before.
  Result Read(void* data, size_t bytes, size_t* done);
  Result Write(const void* data, size_t bytes, size_t* done);

  const std::string& failure() const { return failure_; }

 private:
  friend class Tls;
  explicit Session(const OpenSsl* library) : library_(library) {}
  // Of a call that has returned `returned`.
  Result After(int returned);

  const OpenSsl* const library_;
  bool is_lost_ = false;
  void* session_ = nullptr;
  std::string failure_;
};

}  // namespace dynemb

#endif  // DYNEMB_RANKS_TLS_H_
