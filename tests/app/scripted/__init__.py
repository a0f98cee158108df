"""A Flower app whose run config says what its clients and its server do, for tests of all folders."""
