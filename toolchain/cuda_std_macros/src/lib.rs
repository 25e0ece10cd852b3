//! Part of tandem-attn.
