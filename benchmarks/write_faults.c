/* Faults at the calls by which a program changes files below one folder; preloaded, so whatever language it is
   written in. Counts the calls of all threads of a process; something happens at the n-th:

   cc -shared -fPIC -O1 -o write_faults.so write_faults.c -ldl      and then LD_PRELOAD=write_faults.so

   faults_arm says what and when. Nothing is counted before, nor in a child made later by exec. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, KILL_ALL, KILL_SELF, NO_SPACE, IO_ERROR, SHORT_THEN_FULL, SHORT_THEN_KILLED };
enum { GROWS = 1, SHRINKS = 2, WRITES = 4 }; /* what a call does to a disk; none: it only waits, or names */

struct report { /* lies in memory that the parent shares: it outlives the process */
    long calls, hits;
    char call[16], path[200];
    char all[4096]; /* the first letter of each call */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static size_t folder_length;
static long at;
static int kind;
static struct report *report;

void faults_arm(const char *below, long nth, int what, struct report *where) {
    pthread_mutex_lock(&lock);
    snprintf(folder, sizeof folder, "%s", below);
    folder_length = strlen(folder);
    at = nth, kind = what, report = where;
    pthread_mutex_unlock(&lock);
}

static int is_below(const char *path) {
    return strncmp(path, folder, folder_length) == 0 && (path[folder_length] == '/' || path[folder_length] == 0);
}

static int of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static void absolute(int directory, const char *name, char *path) {
    char parent[PATH_MAX] = "";
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    if (directory == AT_FDCWD)
        name = getcwd(parent, sizeof parent) ? name : "";
    else
        of_descriptor(directory, parent);
    if (snprintf(path, PATH_MAX, "%s/%s", parent, name) >= PATH_MAX) path[0] = 0;
}

static void end(void) {
    kill(kind == KILL_ALL ? 0 : getpid(), SIGKILL); /* 0: every rank of the trial */
    for (;;) pause();
}

/* 0: go on; 1: fail, errno is set; 2: take half of the bytes, then `end_after_half`. */
static int fault(const char *call, const char *path, int effect) {
    int outcome = 0;
    if (folder_length == 0 || !is_below(path)) return 0;
    pthread_mutex_lock(&lock);
    long calls = ++report->calls;
    int now = calls == at;
    if (calls <= (long)sizeof report->all) report->all[calls - 1] = call[0] == 'p' ? 'w' : call[0];
    if (now) {
        snprintf(report->call, sizeof report->call, "%s", call);
        snprintf(report->path, sizeof report->path, "%s", path + folder_length);
        report->hits = 1;
        if (kind == KILL_ALL || kind == KILL_SELF) end();
        if (kind == SHORT_THEN_KILLED && !(effect & WRITES)) end();
        if (kind == IO_ERROR) outcome = 1, errno = EIO;
        if (kind >= SHORT_THEN_FULL && (effect & WRITES)) outcome = 2;
    }
    /* A full disk stays full: whatever needs room fails from now on. */
    if (outcome == 0 && at && calls >= at && (kind == NO_SPACE || kind == SHORT_THEN_FULL))
        if ((effect & GROWS) || (now && !(effect & SHRINKS))) outcome = 1, errno = ENOSPC;
    pthread_mutex_unlock(&lock);
    return outcome;
}

static void end_after_half(void) {
    if (kind == SHORT_THEN_KILLED) kill(getpid(), SIGKILL);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRITE(name, cut, ...)                                                     \
    {                                                                             \
        REAL(name);                                                               \
        char path[PATH_MAX];                                                      \
        int word = 0;                                                             \
        if (folder_length && of_descriptor(descriptor, path))                     \
            word = fault(#name, path, GROWS | WRITES);                            \
        if (word == 1) return -1;                                                 \
        if (word == 2) {                                                          \
            cut;                                                                  \
            ssize_t taken = real(__VA_ARGS__);                                    \
            end_after_half();                                                     \
            return taken;                                                         \
        }                                                                         \
        return real(__VA_ARGS__);                                                 \
    }

ssize_t write(int descriptor, const void *data, size_t size)
WRITE(write, size = (size + 1) / 2, descriptor, data, size)
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset)
WRITE(pwrite, size = (size + 1) / 2, descriptor, data, size, offset)
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset)
WRITE(pwrite64, size = (size + 1) / 2, descriptor, data, size, offset)
ssize_t writev(int descriptor, const struct iovec *parts, int count)
WRITE(writev, count = (count + 1) / 2, descriptor, parts, count)

#define ON_DESCRIPTOR(name)                                                       \
    int name(int descriptor) {                                                    \
        REAL(name);                                                               \
        char path[PATH_MAX];                                                      \
        if (folder_length && of_descriptor(descriptor, path) && fault(#name, path, 0)) return -1; \
        return real(descriptor);                                                  \
    }
ON_DESCRIPTOR(fsync)
ON_DESCRIPTOR(fdatasync)

#define ON_NAME(name, effect, directory, own, parameters, ...)                    \
    int name parameters {                                                         \
        REAL(name);                                                               \
        char path[PATH_MAX];                                                      \
        if (folder_length) {                                                      \
            absolute(directory, own, path);                                       \
            if (fault(#name, path, effect)) return -1;                            \
        }                                                                         \
        return real(__VA_ARGS__);                                                 \
    }
ON_NAME(rename, 0, AT_FDCWD, to, (const char *from, const char *to), from, to)
ON_NAME(renameat, 0, b, to, (int a, const char *from, int b, const char *to), a, from, b, to)
ON_NAME(renameat2, 0, b, to, (int a, const char *from, int b, const char *to, unsigned flags), a, from, b, to, flags)
ON_NAME(mkdir, GROWS, AT_FDCWD, own, (const char *own, mode_t mode), own, mode)
ON_NAME(mkdirat, GROWS, at_folder, own, (int at_folder, const char *own, mode_t mode), at_folder, own, mode)
ON_NAME(unlink, SHRINKS, AT_FDCWD, own, (const char *own), own)
ON_NAME(unlinkat, SHRINKS, at_folder, own, (int at_folder, const char *own, int flags), at_folder, own, flags)
ON_NAME(rmdir, SHRINKS, AT_FDCWD, own, (const char *own), own)
ON_NAME(truncate, SHRINKS, AT_FDCWD, own, (const char *own, off_t size), own, size)

static int open_fault(int directory, const char *name, int flags) {
    char path[PATH_MAX];
    if (!folder_length || !(flags & (O_CREAT | O_TRUNC))) return 0; /* reading changes nothing */
    absolute(directory, name, path);
    return fault("open", path, GROWS);
}

#define MODE(last) va_list more; va_start(more, last); mode_t mode = va_arg(more, int); va_end(more)
#define OPEN(name)                                                                \
    int name(const char *path, int flags, ...) {                                  \
        REAL(name); MODE(flags);                                                  \
        return open_fault(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode);  \
    }
#define OPENAT(name)                                                              \
    int name(int directory, const char *path, int flags, ...) {                   \
        REAL(name); MODE(flags);                                                  \
        return open_fault(directory, path, flags) ? -1 : real(directory, path, flags, mode); \
    }
#define FOPEN(name)                                                               \
    FILE *name(const char *path, const char *how) {                               \
        REAL(name);                                                               \
        return how[0] != 'r' && open_fault(AT_FDCWD, path, O_CREAT) ? NULL : real(path, how); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)
