"""The project's own words, from which `generate` builds its prompt sets. Entries of a list are separated by `;`."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.replace("\n", " ").split(";") if entry.strip())


DIGITS = _words("zero; one; two; three; four; five; six; seven; eight; nine")

# --- signs: what is written, and on what --------------------------------------------------------------------------
FIRST_NAMES = _words("""
    Amber; Birch; Blue Door; Bramble; Cedar; Copper; Corner; Crescent; Driftwood; Ember; Fern; Foxglove; Golden;
    Granite; Harbor; Hazel; Hollow; Indigo; Juniper; Kestrel; Lantern; Lighthouse; Little; Maple; Meadow; Midnight;
    Northern; Old Mill; Orchard; Paper; Pepper; Quiet; Raven; River; Rosemary; Saffron; Silver; Sparrow; Sunny;
    Thistle; Tidal; Velvet; Willow
""")
TRADES = _words("""
    Bakery; Books; Cafe; Ceramics; Cinema; Clocks; Diner; Florist; Framing; Garage; Grocery; Hotel; Ice Cream;
    Kitchen; Knives; Laundry; Library; Market; Museum; Music; Noodles; Optics; Pharmacy; Pizza; Records; Repairs;
    Shoes; Studio; Tailor; Tea Room; Theatre; Toys; Yoga
""")
SHOP_SURFACES = _words("""
    a hand-painted wooden sign above a shop door; a glowing neon sign in a dark window;
    gold lettering on a glass shopfront; a striped awning over a busy pavement;
    a wrought-iron sign hanging over a cobbled lane; tall letters on a brick facade;
    an enamel plate beside a green door; a light box on a street corner at night; a painted mural on a side wall;
    the side of a small delivery van; a canvas tote bag on a market table; a paper coffee cup on a windowsill;
    a round sticker on a laptop lid; the front of a folded menu; a banner across a narrow street
""")
NOTICES = _words("""
    Back in Ten Minutes; Beware of the Goose; Caution Wet Floor; Closed for Snow; Closed Until Monday;
    Deliveries at Rear; Do Not Disturb; Dogs Welcome; Exact Change Only; Fresh Eggs Today; Free Firewood;
    Handle With Care; Keep Off the Grass; Keep This Gate Shut; Lift Out of Order; Lost Cat; Mind the Step;
    Mind Your Head; No Fishing Here; No Swimming; Open Late; Out of Paper; Piano for Sale; Please Knock;
    Please Ring Twice; Please Take a Number; Pull Not Push; Quiet Hours; Road Ahead Closed; Room to Rent;
    Silence Please; Slow Children Playing; Sold Out; Staff Only; Take One; Thin Ice; Ticket Office; Try the Soup;
    Use Other Door; Wait Here; Wet Paint; Work in Progress
""")
NOTICE_SURFACES = _words("""
    a sheet of paper taped to a glass door; a chalkboard on an easel; a yellow plastic floor sign;
    a metal plate on a garden fence; a cardboard sign in a shop window; a red enamel warning sign on a wall;
    a handwritten card on a pinboard; a wooden board nailed to a tree; a laminated notice in a stairwell;
    a sandwich board on the pavement; a brass plaque beside a bell; white stencil letters on a steel door
""")
PLACES = _words("""
    Ashford; Bellmere; Calder Bridge; Dunmore; East Pier; Fallow Hill; Garden Street; High Meadow; Iron Quay;
    Juno Park; Kingsley Road; Lower Town; Mill Lane; North Gate; Old Harbor; Pine Ridge; Quarry Path; Red Lake;
    South Beach; Tower Square; Upper Falls; Vale Station; West End; Yarrow Valley; Zinc Works
""")
DIRECTION_SURFACES = _words("""
    a wooden signpost at a forest fork; a blue road sign beside a country lane; a departure board in a railway hall;
    the destination display of an old tram; a tiled wall in an underground station; a carved milestone in tall grass;
    a green motorway sign over three lanes; the bow of a small ferry; a white arrow sign on a mountain trail;
    a map case at a bus stop
""")
TITLE_HEADS = _words("""
    The Last; A Brief History of; Letters to; The Weight of; Notes on; Beyond; Songs for; The Art of; Winter in;
    The Secret of; Journey to; A Field Guide to
""")
TITLE_TAILS = _words("""
    Clouds; Forgotten Rivers; Glass; Island Birds; Lighthouses; Moss; Paper Boats; Quiet Machines; Salt; Shadows;
    Small Gardens; Snow; Stars; the Orchard; the Sea; Trains; Whales; Wild Honey
""")
TITLE_SURFACES = _words("""
    the cover of a worn leather book; the spine of a paperback on a shelf; a film poster behind scratched glass;
    a vinyl record sleeve leaning on a lamp; a museum banner between two columns; the title page of an open notebook;
    an exhibition ticket held in one hand; a large poster on a concrete wall
""")
LABEL_GOODS = _words("""
    Apple Butter; Black Pepper; Blueberry Jam; Chili Oil; Cloudberry Tea; Coconut Soap; Dark Chocolate; Fig Vinegar;
    Ginger Beer; Green Olives; Heather Honey; Lemon Curd; Lime Cordial; Malt Bread; Mint Syrup; Oat Flour;
    Orange Bitters; Pear Cider; Pine Resin; Plum Wine; Rye Crackers; Sea Salt; Sesame Paste; Smoked Trout;
    Tomato Soup; Vanilla Sugar
""")
LABEL_QUALIFIERS = _words(
    "No. 3; No. 7; No. 12; Batch 21; Reserve; Extra Fine; Cold Pressed; 250 g; Since 1908; Organic"
)
LABEL_SURFACES = _words("""
    a paper label on a glass jar; a tin box on a kitchen shelf; a brown bottle with a cork; a printed flour sack;
    a wooden crate in a cellar; a cardboard box tied with string; a ceramic pot with a stamped lid
""")
SIGN_LIGHTS = _words("""
    in soft morning light; lit by a single lamp; in warm evening light; photographed at an angle;
    seen through a window; in sharp close-up; in a grainy black-and-white photograph; as a flat vector illustration;
    as a loose watercolour; in a crisp photograph; in cool blue light; with deep shadows;
    in a detailed pencil drawing; with a blurred background
""")

# --- scenes: who fits where ---------------------------------------------------------------------------------------
SCENES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "country": (
        _words("""
            a barn owl on a fence post; a row of beehives; a lone oak tree; a hot air balloon; a family of hedgehogs;
            a herd of wild horses; a weathered stone bridge; a mountain goat; a flock of starlings; a red fox;
            a shepherd with two dogs; a rusted tractor; a ring of standing stones; a tent with a lamp inside;
            a painter at her easel; a scarecrow in a straw hat
        """),
        _words("""
            at the edge of a birch forest; beside a frozen lake; in a field of lavender; at the foot of a waterfall;
            on a cliff above the sea; on a desert road; among rice terraces; in a moss-covered ruin;
            in a volcanic valley; on a hillside of heather; in an apple orchard; on a mountain pass;
            in a meadow of poppies; at the end of a dirt track
        """),
    ),
    "water": (
        _words("""
            an old fisherman mending a net; a sailing boat with tan sails; a kingfisher with a fish;
            a wooden rowing boat; a pair of otters; a heron on one leg; a lighthouse keeper with a lantern;
            a ferry with two funnels; a diver adjusting a brass helmet; a houseboat with flower boxes;
            a seal on a rock; a swimmer in a striped cap
        """),
        _words("""
            in a small harbour; on a windswept beach; beside a still canal; on a pier in the rain;
            in a reed-lined bay; at low tide; on a lake between mountains; at the mouth of a river; near a breakwater;
            under a stone bridge; in a rocky cove; beside a lock gate
        """),
    ),
    "town": (
        _words("""
            a red bicycle with a wicker basket; a girl flying a paper kite; a violinist in a grey coat;
            a child in yellow rubber boots; a baker carrying loaves; a couple dancing;
            an astronaut reading a newspaper; a vintage tram; a street sweeper with a broom; a black cat on a wall;
            a market stall full of peppers; a boy with a skateboard; a knight in dented armour; a flower seller;
            a delivery robot; a newspaper kiosk
        """),
        _words("""
            on a rooftop above a city; in a narrow alley with hanging laundry; at a night market;
            under a motorway bridge; in a snowed-in village square; on a wide flight of steps; at a tram stop;
            in front of a theatre; in a cobbled courtyard; beside a fountain; in a park in autumn;
            on a pedestrian crossing; under a railway arch; outside a corner shop
        """),
    ),
    "indoors": (
        _words("""
            a sleeping tabby cat; a blacksmith at the anvil; a potter shaping a bowl; a stack of suitcases;
            a grandfather clock; a glass teapot with blooming tea; a chess game in progress; a robot watering plants;
            a vintage typewriter; a porcelain doll; a cellist and her dog; a bowl of lemons;
            a watchmaker with a loupe; a model ship in a bottle; an upright piano with open music;
            a seamstress at her machine
        """),
        _words("""
            in a cluttered workshop; in a quiet library; in a sunlit kitchen; in a greenhouse full of ferns;
            on a theatre stage; inside a large glass dome; in an attic with a round window; in a tiled hallway;
            in a small museum; in a railway waiting room; in a room with blue wallpaper; under a spiral staircase;
            beside a wood stove; in a barn converted to a studio
        """),
    ),
}
"""Setting -> (subjects, places) that go together."""
SCENE_LIGHTS = _words("""
    golden hour; blue hour; harsh noon light; lit by a single lantern; overcast light; moonlight;
    a shaft of light through dust; coloured light from a window; long shadows; morning mist; a gathering thunderstorm;
    soft side light; firelight; flat winter light
""")
SCENE_STYLES = _words("""
    photograph with shallow depth of field; oil painting with thick brush strokes; pencil drawing with hatching;
    linocut print; gouache illustration; wide-angle photograph; isometric pixel art; ink wash on rice paper;
    paper-cut collage; film still; charcoal sketch; stop-motion clay set; botanical engraving; pastel drawing
""")
COLOURS = _words("red; green; blue; yellow; orange; purple; white; black; pink; brown; turquoise; silver")
NUMBERS = _words("two; three; four; five; six")
OBJECTS = _words("""
    bottles; apples; mugs; books; chairs; candles; umbrellas; boots; marbles; balloons; lamps; pears; envelopes;
    teacups; dice; lanterns; birdhouses; buttons; hats; pencils; feathers; keys
""")
SINGLE_OBJECTS = _words("""
    vase; bowl; suitcase; armchair; kettle; clock; ladder; wheelbarrow; telephone; globe; drum; basket; violin;
    watering can; rocking horse; sewing machine; toolbox; accordion; mirror; birdcage
""")
RELATIONS = _words("to the left of; to the right of; in front of; behind; beneath; on top of; next to; around")
COMPOSITION_PLACES = _words("""
    on a wooden table; on a checkered floor; on a windowsill; on fresh grass; on a concrete bench; on a blue carpet;
    on wet sand; on a marble counter; on a snow-covered step; on a plain grey background
""")

# --- videos -------------------------------------------------------------------------------------------------------
VIDEOS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "land": (
        _words("""
            a golden retriever; a woman in a red raincoat; a skateboarder; a white horse; a red fox;
            a cyclist in a yellow jersey; a boy with a kite; a mountain goat; an old man with an umbrella;
            a jogger with a small dog; a girl on roller skates; a stray cat
        """),
        _words("""
            walks slowly from left to right; comes straight towards the camera; turns in a full circle;
            speeds up and leaves the frame; stops, hesitates and turns back;
            passes through the foreground from right to left; disappears behind a wall and comes out again;
            shrinks into the distance; leaps over a puddle; circles a lamp post
        """),
        _words("""
            along a tree-lined avenue; on a rain-soaked street at night; across a snowy field; between market stalls;
            in front of a graffiti wall; along a dry path; on a stone bridge; past rows of windows;
            at the edge of a cornfield; on a windy beach; under autumn trees; in an empty car park; beside a campfire;
            on a rooftop at sunset
        """),
    ),
    "water": (
        _words("""
            a paper boat; a humpback whale; a school of silver fish; a canoe with two paddlers; a jellyfish;
            a sea turtle; a family of ducks; a small ferry; a swimmer in a red cap; a floating lantern
        """),
        _words("""
            drifts slowly from left to right; rises and slowly sinks again; glides towards the camera;
            turns in a wide arc; is rocked by a passing wave; moves into a patch of bright light;
            crosses the frame from right to left; fades into the distance
        """),
        _words("""
            in shallow turquoise water; over a calm lake at dawn; in a flooded quarry; in a harbour at dusk;
            under a wooden pier; on a slow green river; in rain; along a rocky coast; in clear winter water;
            between water lilies
        """),
    ),
    "vehicles": (
        _words("""
            an old tram; a steam train; a yellow bulldozer; a delivery van; a red double-decker bus;
            a tractor with a trailer; a cable car; a motorbike with a sidecar; a small snow plough; a rickshaw
        """),
        _words("""
            rolls slowly from left to right; comes straight towards the camera and stops;
            pulls away and gathers speed; follows a long curve; crosses from right to left behind a row of trees;
            backs up a short way; climbs a gentle slope; vanishes into the distance;
            enters the frame and blocks the view for a moment
        """),
        _words("""
            in a mountain village; in a snow-covered valley; on the outskirts of a town; beside a wheat field;
            in thick fog; under heavy clouds; in low evening sun; after a thunderstorm; at first light;
            beneath a tall viaduct
        """),
    ),
    "close": (
        _words("""
            a candle flame; a cook tossing noodles; a street drummer; a hummingbird; a marble on a wooden track;
            a glass being filled with milk; a tumbling leaf; a potter's wheel with wet clay; a ballet dancer;
            a spinning top; a soap bubble; a watch with a bare movement
        """),
        _words("""
            moves in a steady rhythm; slows down until it almost stops; starts suddenly; trembles and settles;
            is seen through a pane of glass; is lit from one side, then from the other; casts a moving shadow;
            moves out of focus and back again
        """),
        _words("""
            in a sunlit hall; in a dim workshop; on a black stage; beside a window with rain; on a wooden table;
            in a small kitchen; in front of a white wall; in a covered courtyard; under a single lamp;
            against a deep blue backdrop
        """),
    ),
}
"""Kind -> (who, motions, places) that go together."""
CAMERAS = _words("""
    static camera; slow pan to the right; handheld camera; camera pulls back; low tracking shot; slow zoom in;
    shot from above; camera orbits the subject; steady shot in slow motion; time lapse;
    close-up with blurred background; wide shot
""")
