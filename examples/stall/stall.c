/* For LD_PRELOAD: a disk that stalls. While the file that WEIR_STALL names exists, no fdatasync, fsync or msync of the
 * program returns. Used by tests and by bench/client_load. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void wait_for_the_disk(void) {
  const char* file = getenv("WEIR_STALL");
  const struct timespec pause = {0, 5 * 1000 * 1000};
  while (file != NULL && access(file, F_OK) == 0) nanosleep(&pause, NULL);
}

int fdatasync(int fd) {
  static int (*real)(int);
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, "fdatasync");
  wait_for_the_disk();
  return real(fd);
}

int fsync(int fd) {
  static int (*real)(int);
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, "fsync");
  wait_for_the_disk();
  return real(fd);
}

int msync(void* address, size_t length, int flags) {
  static int (*real)(void*, size_t, int);
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, "msync");
  wait_for_the_disk();
  return real(address, length, flags);
}
