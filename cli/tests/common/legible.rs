//! Pictures as a reader sees them: no text on another, nothing beyond the page, whatever the size.

use std::sync::{Arc, OnceLock};

use resvg::{tiny_skia, usvg};
use roxmltree::Document;

pub fn number(node: roxmltree::Node<'_, '_>, name: &str) -> f64 {
    let value = node
        .attribute(name)
        .unwrap_or_else(|| panic!("{node:?} has no {name}"));
    value
        .parse()
        .unwrap_or_else(|_| panic!("{name} is {value}"))
}

/// A text, and the area that it takes: left, top, right, bottom.
#[derive(Debug)]
struct Text {
    text: String,
    area: [f64; 4],
}

/// Texts by an estimate of their letters' width, which needs no fonts.
fn estimated(document: &Document<'_>) -> Vec<Text> {
    let nodes = document
        .descendants()
        .filter(|node| node.has_tag_name("text"));
    nodes
        .map(|node| {
            let text = node.text().unwrap_or("").to_owned();
            let size = number(node, "font-size");
            assert!(
                size >= 12.0,
                "{text:?} is too small to read at 1,200 pixels"
            );
            let width = text.chars().count() as f64 * size * 0.56;
            let (x, y) = (number(node, "x"), number(node, "y"));
            let left = match node.attribute("text-anchor") {
                Some("end") => x - width,
                Some("middle") => x - width / 2.0,
                _ => x,
            };
            let (above, below) = (0.75 * size, 0.2 * size);
            let area = match node.attribute("transform") {
                // Read from below: what was to the right is above.
                Some(_) => [x - above, y - (left + width - x), x + below, y + (x - left)],
                None => [left, y - above, left + width, y + below],
            };
            Text { text, area }
        })
        .collect()
}

/// Texts as they are laid out with the fonts of this machine.
fn laid_out(group: &usvg::Group, texts: &mut Vec<Text>) {
    for node in group.children() {
        match node {
            usvg::Node::Group(group) => laid_out(group, texts),
            usvg::Node::Text(text) => {
                let drawn = text.flattened().abs_bounding_box();
                let sides = [drawn.left(), drawn.top(), drawn.right(), drawn.bottom()];
                texts.push(Text {
                    text: text.chunks().iter().map(|chunk| chunk.text()).collect(),
                    area: sides.map(f64::from),
                });
            }
            _ => {}
        }
    }
}

fn check(texts: &[Text], width: f64, height: f64) {
    for (index, one) in texts.iter().enumerate() {
        let [left, top, right, bottom] = one.area;
        assert!(
            left >= 0.0 && top >= 0.0 && right <= width && bottom <= height,
            "{one:?} leaves the page of {width} × {height}"
        );
        for other in &texts[index + 1..] {
            let apart = right <= other.area[0]
                || other.area[2] <= left
                || bottom <= other.area[1]
                || other.area[3] <= top;
            assert!(apart, "{one:?} and {other:?} overlap");
        }
    }
}

/// Texts that the document has, after checking that none overlaps another or leaves the page: by an estimate, and
/// as laid out and rendered where this machine has fonts.
pub fn legible(svg: &str) -> Vec<String> {
    let document = Document::parse(svg).expect("well-formed");
    let root = document.root_element();
    let (width, height) = (number(root, "width"), number(root, "height"));
    let texts = estimated(&document);
    check(&texts, width, height);
    for rect in document
        .descendants()
        .filter(|node| node.has_tag_name("rect"))
    {
        let (right, bottom) = (
            rect.attribute("x").map_or(0.0, |_| number(rect, "x")) + number(rect, "width"),
            rect.attribute("y").map_or(0.0, |_| number(rect, "y")) + number(rect, "height"),
        );
        assert!(
            right <= width + 0.5 && bottom <= height,
            "{rect:?} leaves the page"
        );
    }
    rendered(svg, texts.len());
    texts.into_iter().map(|text| text.text).collect()
}

/// The widths at which pictures are looked at: in a page of two columns, in one of its own, on a wall.
const WIDTHS: [u32; 3] = [600, 1200, 2400];

/// The fonts of this machine, read once. `None` where there are none.
fn fonts() -> Option<Arc<usvg::fontdb::Database>> {
    static FONTS: OnceLock<Option<Arc<usvg::fontdb::Database>>> = OnceLock::new();
    let read = || {
        let mut fonts = usvg::fontdb::Database::new();
        fonts.load_system_fonts();
        let family = fonts.faces().next()?.families[0].0.clone();
        // Any sans serif that there is.
        let sans = fonts
            .faces()
            .find(|face| face.families[0].0 == "DejaVu Sans");
        let family = sans.map_or(family, |face| face.families[0].0.clone());
        fonts.set_sans_serif_family(family);
        Some(Arc::new(fonts))
    };
    FONTS.get_or_init(read).clone()
}

fn rendered(svg: &str, texts: usize) {
    let Some(fontdb) = fonts() else {
        eprintln!("no fonts on this machine: texts are estimated only");
        return;
    };
    let options = usvg::Options {
        fontdb,
        ..usvg::Options::default()
    };
    let tree = usvg::Tree::from_str(svg, &options).expect("a picture");
    let mut found = Vec::new();
    laid_out(tree.root(), &mut found);
    assert_eq!(found.len(), texts, "a text is not drawn");
    let size = tree.size();
    check(&found, f64::from(size.width()), f64::from(size.height()));
    for width in WIDTHS {
        let scale = width as f32 / size.width();
        let height = (size.height() * scale).ceil() as u32;
        let mut pixels = tiny_skia::Pixmap::new(width, height).expect("memory");
        let transform = tiny_skia::Transform::from_scale(scale, scale);
        resvg::render(&tree, transform, &mut pixels.as_mut());
        // A card of its own: on a dark page nothing of that shows through, and on it stands something.
        assert!(pixels.pixels().iter().all(|pixel| pixel.alpha() > 100));
        let mut ink = pixels.pixels().iter().filter(|pixel| pixel.red() < 128);
        assert!(ink.nth(100).is_some(), "nothing is drawn at {width} pixels");
        if let Some(directory) = std::env::var_os("TANDEM_PICTURES") {
            save(&pixels, directory.as_ref(), svg, width);
        }
    }
}

/// Keeps a picture to look at: `TANDEM_PICTURES=/tmp cargo test --test pictures`.
fn save(pixels: &tiny_skia::Pixmap, directory: &std::path::Path, svg: &str, width: u32) {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    svg.hash(&mut hasher);
    let title = svg.split("<title>").nth(1).unwrap_or("picture");
    let title: String = title
        .chars()
        .take(24)
        .filter(|c| c.is_ascii_alphanumeric())
        .collect();
    let name = format!("{title}-{:04x}-{width}", hasher.finish() & 0xffff);
    std::fs::write(directory.join(format!("{name}.svg")), svg).expect("writable");
    let data: Vec<u8> = pixels
        .data()
        .chunks(4)
        .flat_map(|pixel| pixel[..3].to_vec())
        .collect();
    let header = format!("P6\n{} {}\n255\n", pixels.width(), pixels.height());
    let mut ppm = header.into_bytes();
    ppm.extend(data);
    std::fs::write(directory.join(format!("{name}.ppm")), ppm).expect("writable");
}
