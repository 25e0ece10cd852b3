//! The architecture that PTX is for.

/// PTX with the first line `.target` naming another architecture.
pub fn for_target(ptx: &[u8], arch: &str) -> Option<Vec<u8>> {
    const LINE: &[u8] = b"\n.target ";
    let head = &ptx[..ptx.len().min(4096)];
    let name = head.windows(LINE.len()).position(|it| it == LINE)? + LINE.len();
    let end = name + ptx[name..].iter().position(|&byte| byte == b'\n')?;
    Some([&ptx[..name], arch.as_bytes(), &ptx[end..]].concat())
}
