"""An app of the benchmark gpu: it trains on a GPU without cuBLAS and cuDNN."""
