// The library and the files of TLS between ranks; ranks_test has the connections.
#include "cc/ranks/tls.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "tests/cc/certificates.h"

namespace {
// The libraries that cannot be opened are those whose names contain this.
const char* absent = nullptr;
}  // namespace

extern "C" void* dlopen(const char* name, int flags) {
  using Open = void* (*)(const char*, int);
  static const auto real = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen"));
  if (absent == nullptr || name == nullptr || strstr(name, absent) == nullptr) {
    return real(name, flags);
  }
  return real((std::string("/absent/") + name).c_str(), flags);
}

namespace dynemb {
namespace {

class TlsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!Certificates::Shared().has_command()) {
      GTEST_SKIP() << "there is no command `openssl` that makes certificates";
    }
  }
  void TearDown() override { absent = nullptr; }

  static Status Load(const std::string& library, const Tls::Files& files) {
    std::shared_ptr<const Tls> tls;
    const Status status = Tls::Load(library, files, &tls);
    EXPECT_EQ(tls != nullptr, status.ok());
    return status;
  }
  const Tls::Files& files() const { return files_; }

 private:
  const Tls::Files files_ = Certificates::Shared().files();
};

TEST_F(TlsTest, FilesThatCannotBeUsedAreNamed) {
  const Certificates others;
  const struct {
    Tls::Files files;
    const char* error;
  } cases[] = {
      {{"/no", files().key, files().authority}, "the certificate in '/no' cannot be used: "},
      {{files().certificate, "/no", files().authority}, "the key in '/no' cannot be used: "},
      {{files().certificate, files().key, "/no"},
       "the certificates of the authority in '/no' cannot be used: "},
      {{files().certificate, files().certificate, files().authority}, "the key in "},
      {{files().key, files().key, files().authority}, "the certificate in "},
      {{files().certificate, others.files().key, files().authority}, "key values mismatch"},
  };
  for (const auto& [files, error] : cases) {
    const Status status = Load("", files);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(error), std::string::npos) << status.message();
  }
}

// A library without OpenSSL's functions, and one that is not there: the system's are tried next.
TEST_F(TlsTest, AnotherLibrary) {
  for (const char* library : {"libc.so.6", "/no/such/library.so"}) {
    const Status status = Load(library, files());
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

// libcrypto, of which libssl depends, has a part of the functions.
TEST_F(TlsTest, NoLibrary) {
  absent = "libssl";
  const Status status = Load("libcrypto.so.3", files());
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  for (const char* part :
       {"needs the shared libraries of OpenSSL 1.1.1 or 3, and none was found",
        "libcrypto.so.3 has no ", "; /absent/libssl.so.3: ", "; /absent/libssl.so.1.1: "}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace dynemb
