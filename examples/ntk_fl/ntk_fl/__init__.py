"""NTK-FL (Yue et al., ICML 2022) on handwritten digits."""
