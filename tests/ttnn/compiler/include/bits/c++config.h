// The host's libstdc++ is configured for Linux and its threads; the device has neither.
#include_next <bits/c++config.h>
#undef _GLIBCXX_HAS_GTHREADS
#undef _GLIBCXX_HAVE_LINUX_FUTEX
