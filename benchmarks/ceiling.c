/* The ceiling of a norm's speed: a copy of one tensor (forward), or the sum of two into a third
 * (backward). With a residual, one pass that reads two tensors and writes two (forward), or sums three
 * into a fourth (backward); x, y and dy may be half as wide as the others.
 *
 * Ordinary stores only: memcpy of this size would switch to non-temporal ones, so these are plain
 * loops, compiled with -fno-tree-loop-distribute-patterns to keep them loops. The sum is one of
 * integers, whatever the type: it moves the same bytes and never meets a denormal. The work is cut
 * into shares that the calling thread and threads - 1 helpers take one by one, so that nobody waits
 * for a helper that has yet to wake up; helpers spin for about a millisecond before they sleep. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { kSpins = 20000, kWordsPerLine = 16, kSharesPerThread = 8, kLeastShareWords = 8192 };

/* What one run does, on so many words of 32 bits: out = a; a + b where there is a b; a + b + c where
 * there is a c. With `sum`: sum = a + b, and out is a copy of it. `half`: a has as many words of 16
 * bits, and so has out beside a sum. Mirrored by cpu_contenders.py. */
typedef struct {
  const void *a, *b, *c;
  void *out, *sum;
  size_t words;
  int half;
} Pass;

static Pass job;
static size_t step;             /* words of a share */
static _Atomic uint64_t claims; /* generation << 32 | shares that nobody has taken yet */
static atomic_uint unfinished;
static atomic_uint generation;
static size_t thread_count = 1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

static void copy(uint32_t* restrict out, const uint32_t* restrict a, size_t words) {
  for (size_t i = 0; i < words; ++i) out[i] = a[i];
}

static void add(uint32_t* restrict out, const uint32_t* restrict a, const uint32_t* restrict b,
                size_t words) {
  for (size_t i = 0; i < words; ++i) out[i] = a[i] + b[i];
}

#define WITH_RESIDUAL(name, Word)                                                      \
  static void sum_and_copy_##name(Word* restrict out, uint32_t* restrict sum,          \
                                  const Word* restrict a, const uint32_t* restrict b,  \
                                  size_t words) {                                      \
    for (size_t i = 0; i < words; ++i) out[i] = (Word)(sum[i] = a[i] + b[i]);          \
  }                                                                                    \
  static void add_three_##name(uint32_t* restrict out, const Word* restrict a,         \
                               const uint32_t* restrict b, const uint32_t* restrict c, \
                               size_t words) {                                         \
    for (size_t i = 0; i < words; ++i) out[i] = a[i] + b[i] + c[i];                    \
  }
WITH_RESIDUAL(words, uint32_t)
WITH_RESIDUAL(halves, uint16_t)

static void run_share(size_t begin, size_t words) {
  const uint32_t *a = job.a, *b = job.b, *c = job.c;
  const uint16_t* half_a = job.a;
  uint32_t *out = job.out, *sum = job.sum;
  uint16_t* half_out = job.out;
  if (sum && job.half) {
    sum_and_copy_halves(half_out + begin, sum + begin, half_a + begin, b + begin, words);
  } else if (sum) {
    sum_and_copy_words(out + begin, sum + begin, a + begin, b + begin, words);
  } else if (c && job.half) {
    add_three_halves(out + begin, half_a + begin, b + begin, c + begin, words);
  } else if (c) {
    add_three_words(out + begin, a + begin, b + begin, c + begin, words);
  } else if (b) {
    add(out + begin, a + begin, b + begin, words);
  } else {
    copy(out + begin, a + begin, words);
  }
}

static int claim_and_run(void) {
  uint64_t claim = atomic_load(&claims);
  do {
    if ((uint32_t)claim == 0) return 0;
  } while (!atomic_compare_exchange_weak(&claims, &claim, claim - 1));
  /* The job cannot end before this share has, so it stays as it is. */
  const size_t begin = ((uint32_t)claim - 1) * step;
  if (begin < job.words) run_share(begin, job.words - begin < step ? job.words - begin : step);
  atomic_fetch_sub(&unfinished, 1);
  return 1;
}

static void* help(void* unused) {
  (void)unused;
  unsigned seen = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins && atomic_load(&generation) == seen; ++spin) {
      __builtin_ia32_pause();
    }
    pthread_mutex_lock(&mutex);
    while (atomic_load(&generation) == seen) pthread_cond_wait(&wake, &mutex);
    pthread_mutex_unlock(&mutex);
    seen = atomic_load(&generation);
    while (claim_and_run()) {
    }
  }
  return NULL;
}

/* Once, before the first run. 0 on success. */
int ceiling_start(int threads) {
  if (threads < 1) return 1;
  thread_count = (size_t)threads;
  for (int i = 1; i < threads; ++i) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, help, NULL)) return 1;
    pthread_detach(thread);
  }
  return 0;
}

void ceiling_run(const Pass* pass) {
  size_t shares = pass->words / kLeastShareWords;
  if (shares > thread_count * kSharesPerThread) shares = thread_count * kSharesPerThread;
  if (shares < 1) shares = 1;
  job = *pass;
  step = (pass->words / shares / kWordsPerLine + 1) * kWordsPerLine;
  atomic_store(&unfinished, (unsigned)shares);
  atomic_store(&claims, (uint64_t)(atomic_load(&generation) + 1) << 32 | shares);
  pthread_mutex_lock(&mutex);
  atomic_fetch_add(&generation, 1);
  pthread_cond_broadcast(&wake);
  pthread_mutex_unlock(&mutex);
  while (claim_and_run()) {
  }
  for (int spin = 0; atomic_load(&unfinished) != 0; ++spin) {
    if (spin < kSpins) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }
}
