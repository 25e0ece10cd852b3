//! The colours of all pictures. Prefill and decode have the same colour everywhere.

/// Prefill, and decode.
pub(crate) const PREFILL: &str = "#d1701f";
pub(crate) const DECODE: &str = "#2a7fba";

/// Pairs of shades for neighbours: another pair for each further tile of a plan.
pub(super) const PREFILL_SHADES: [[&str; 2]; 4] = [
    [PREFILL, "#e69a5c"],
    ["#9c4f10", "#bd7232"],
    ["#e8a469", "#f3c59d"],
    ["#6f3608", "#8f5420"],
];
pub(super) const DECODE_SHADES: [[&str; 2]; 4] = [
    [DECODE, "#5fa5d3"],
    ["#175380", "#38759f"],
    ["#74b3dc", "#a3cfea"],
    ["#0d3757", "#2b5875"],
];
/// Kernels that are neither prefill nor decode.
pub(super) const OTHER_SHADES: [&str; 2] = ["#4a9a4a", "#80be80"];

/// Text, axes and grid lines.
pub(crate) const INK: &str = "#222222";
pub(crate) const AXIS: &str = "#777777";
pub(crate) const GRID: &str = "#e2e2e2";
/// Marks a stall.
pub(crate) const ALARM: &str = "#b3123f";
/// Used if there is only one quantity.
pub(crate) const NEUTRAL: &str = "#3f6f73";
pub(crate) const NEUTRAL_LIGHT: &str = "#a9c7c9";

/// A colour for each implementation in turn. Together with the seven [`Mark`](super::Mark)s, 56 series can be
/// distinguished.
pub(super) const SERIES: [&str; 8] = [
    "#1b6ca8", "#d55e00", "#00805e", "#b8478f", "#6a4fc0", "#8a6500", "#555555", "#c0282d",
];
