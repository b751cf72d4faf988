// What the two sources of the recorder share: recorder.c describes it.
#ifndef RECORDER_H_
#define RECORDER_H_

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

// As in replay.py.
enum kind {
  CREATE = 1,  // path; inode
  MKDIR,       // path; inode
  WRITE,       // inode, offset, bytes
  TRUNCATE,    // inode; the new size, which may be larger, as the offset
  SYNC,        // path; inode
  RENAME,      // from, to
  LINK,        // from, to
  UNLINK,      // path
  RMDIR,       // path
  MARK,        // text
  UNKNOWN,     // text
  KINDS
};

#define PUBLIC __attribute__((visibility("default")))
// Sizes and offsets have 64 bits either way.
#define SAME_AS(name) __attribute__((alias(#name)))
#define REAL(result, name, ...)       \
  static result (*real)(__VA_ARGS__); \
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, #name)

// Held during a call and its record. Recursive.
extern pthread_mutex_t recorder_lock;
// The descriptor of the trace; below 0 if nothing is recorded.
extern volatile int recorder_trace;

// Appends a record.
void put(uint32_t kind, int error, uint64_t inode, uint64_t offset, const char* path,
         const char* other, const void* data, size_t bytes);
// Appends what cannot be followed.
void put_unknown(const char* what, const char* path);
// Whether a call fails as it was told to; errno and a record then say so.
int fails(uint32_t kind, uint64_t inode, const char* path, const char* other);
// Whether a path that a call names is in the folder; sets `to`, of PATH_MAX bytes, to its part
// after the folder's name. Links in the names of directories are followed, the last name is kept.
int resolve(int folder, const char* path, char* to);
// Whether a descriptor is of a file in the folder; its status and path.
int is_ours(int file, struct stat* found, char* path);
// The C library's write.
ssize_t real_write(int file, const void* from, size_t n);

#endif  // RECORDER_H_
