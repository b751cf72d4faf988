// Certificates of ranks for tests, which the command `openssl` makes.
#ifndef DYNEMB_TESTS_CC_CERTIFICATES_H_
#define DYNEMB_TESTS_CC_CERTIFICATES_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "cc/ranks/tls.h"
#include "tests/cc/test_files.h"

// The thread sanitizer does not see how OpenSSL, which is not compiled for it, orders its accesses.
extern "C" __attribute__((used)) inline const char* __tsan_default_suppressions() {
  return "called_from_lib:libssl.so\ncalled_from_lib:libcrypto.so\n";
}

namespace dynemb {

// An authority, and a rank that it has certified.
class Certificates {
 public:
  explicit Certificates(const std::string& name = "ca") {
    const std::string key = " -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    has_command_ = std::system("openssl version >/dev/null 2>&1") == 0;
    if (!has_command_) return;
    Run("openssl req -x509 -days 2 -subj /CN=" + name + " -keyout ca.key -out ca.pem" + key);
    Run("openssl req -subj /CN=rank -keyout rank.key -out rank.csr" + key);
    for (const std::string days : {"2", "-1"}) {
      Run("openssl x509 -req -in rank.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out rank" +
          days + ".pem -days " + days);
    }
  }

  // Whether the command is there; if not, nothing else may be called.
  bool has_command() const { return has_command_; }

  Tls::Files files() const { return {folder_ / "rank2.pem", folder_ / "rank.key", authority()}; }
  Tls::Files expired() const { return {folder_ / "rank-1.pem", folder_ / "rank.key", authority()}; }
  std::string authority() const { return folder_ / "ca.pem"; }

  static std::shared_ptr<const Tls> Load(const Tls::Files& files) {
    std::shared_ptr<const Tls> tls;
    const Status status = Tls::Load("", files, &tls);
    EXPECT_TRUE(status.ok()) << status.message();
    return tls;
  }

  // Those of this process.
  static const Certificates& Shared() {
    static const Certificates shared;
    return shared;
  }

 private:
  void Run(const std::string& command) {
    const std::string line = "cd '" + folder_.path() + "' && " + command + " 2>>log";
    EXPECT_EQ(std::system(line.c_str()), 0) << testing_files::Read(folder_ / "log");
  }

  testing_files::Folder folder_;
  bool has_command_ = false;
};

}  // namespace dynemb

#endif  // DYNEMB_TESTS_CC_CERTIFICATES_H_
