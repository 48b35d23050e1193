// One thread for each processor.
#include <bits/gthr-single.h>
