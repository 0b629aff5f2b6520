// Fetches the next few lines of memory that a product will need. Included after vec.h, inside a namespace of
// for_each_isa.h: no include guard.
PPO_FAST_FN void fetch_ahead(Ahead& ahead) {
  for (int64_t i = 0; i < ahead.lines && ahead.next < ahead.end; ++i) {
    __builtin_prefetch(ahead.next, 0, 2);
    ahead.next += 64;
    if (ahead.gap && ahead.next >= ahead.strip_end) {
      ahead.next = ahead.strip_end + ahead.gap;
      ahead.strip_end += ahead.pitch;
    }
  }
}
